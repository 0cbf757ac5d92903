// What is kept of the owner's chats, in memory and on disk. Asked for when the drawer opens and, while it is
// open, when a reply has ended; never in between. Titles and texts are set as text.
const kw = window.keepwarm;
const { el } = kw;
const root = document.documentElement;
const unfolded = new Set();
let isOpen = false;
let writing = new Set();

const STATES = { "in memory": "live", "partly in memory": "live", "on disk": "stored", evicted: "evicted" };

function nodeRow(node) {
  const states = node.states.map((state) => el("span", { class: "kw-state", "data-state": STATES[state] }, state));
  const notes = node.notes.map((note) => el("span", { class: "kw-mark" }, note));
  return el("li", {}, el("span", { class: "kw-words" }, node.text),
    el("span", { class: "kw-facts" }, el("span", {}, node.size), ...states, ...notes));
}

function branch(part) {
  return el("div", { class: "kw-branch", style: `--depth: ${Math.min(part.depth, 4)}` },
    part.label ? el("p", { class: "kw-fork" }, part.label) : null, el("ul", {}, ...part.nodes.map(nodeRow)));
}

function chatPart(chat) {
  const details = el("details", { "data-id": chat.id },
    el("summary", {}, el("span", { class: "kw-title" }, chat.title), el("span", { class: "kw-line" }, chat.line)),
    ...chat.branches.map(branch), chat.more ? el("p", { class: "kw-more" }, chat.more) : null);
  details.open = unfolded.has(chat.id);
  details.addEventListener("toggle", () => { if (details.open) unfolded.add(chat.id); else unfolded.delete(chat.id); });
  return details;
}

function paint() {
  const section = element.querySelector("section");
  const { summary, chats = [], more, note } = told();
  if (!section || summary === undefined) return;
  const focused = document.activeElement?.closest?.("#caches details")?.dataset.id;
  section.replaceChildren(el("p", { class: "kw-sum" }, summary), ...chats.map(chatPart),
    ...[more, note].filter(Boolean).map((text) => el("p", { class: "kw-more" }, text)));
  if (focused) section.querySelector(`details[data-id="${CSS.escape(focused)}"] summary`)?.focus({ preventScroll: true });
}

function look() {
  const opened = root.classList.contains("drawer-open");
  if (opened && !isOpen) {
    if (kw.shown.conversation) unfolded.add(kw.shown.conversation);
    trigger("look", {});
  }
  isOpen = opened;
}

document.addEventListener("keepwarm:writing", () => {
  const now = new Set(kw.writing || []);
  const hasEnded = [...writing].some((id) => !now.has(id));
  writing = now;
  if (hasEnded && isOpen) trigger("look", {});
});

new MutationObserver(look).observe(root, { attributes: true, attributeFilter: ["class"] });
watch("value", paint);
paint();
look();
