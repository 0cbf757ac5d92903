// Paints into the Chatbot's rows: exact text of questions, versions, stats, endings, progress, and what verbs.js
// makes of tools and editors.
// Gradio draws the rows; row i belongs to marks.rows[i]. Painting is idempotent and touches a row only
// when its mark or its element changed, so finished rows stay as they are while a reply grows.
const kw = window.keepwarm;
const { el } = kw;
let chat = null;

const ARROW = { back: "M14.5 6l-6 6 6 6", forth: "M9.5 6l6 6-6 6" };

function versions(mark) {
  if (!mark.version) return null;
  const [position, count] = mark.version;
  const step = (label, d, by) => el("button", { type: "button", "aria-label": label, onclick: () => kw.verbs.act("version", mark.id, { step: by }) }, kw.icon(d));
  return el("span", { class: "kw-versions", role: "group", "aria-label": `Version ${position} of ${count}` },
    step("Previous version", ARROW.back, -1), el("span", {}, `${position}/${count}`), step("Next version", ARROW.forth, 1));
}

function stats(mark) {
  if (!mark.stats || !mark.stats.line) return null;
  const facts = mark.stats.details.flatMap(([label, value]) => [el("dt", {}, label), el("dd", {}, value)]);
  const node = el("details", { class: "kw-stats" }, el("summary", {}, mark.stats.line), el("dl", {}, ...facts));
  node.addEventListener("toggle", () => node.open && node.scrollIntoView({ block: "nearest" }));
  return node;
}

const OFFERS = { continue: ["Continue", "go_on"], answer: ["Write a reply", "regenerate"] };

function ending(mark) {
  const action = (label, verb) => el("button", { type: "button", class: "kw-again", onclick: () => kw.verbs.act(verb, mark.id) }, label);
  const offer = mark.offer ? action(...OFFERS[mark.offer]) : null;
  if (mark.error) return el("div", { class: "kw-error", role: "alert" }, el("p", {}, mark.error), offer, action("Try again", "regenerate"));
  return el("div", { class: "kw-ending" }, el("p", { class: "kw-note" }, mark.note), offer);
}

function foot(mark) {
  return el("div", { class: "kw-foot" }, versions(mark), stats(mark), kw.verbs.tools(mark));
}

function progress(live) {
  const bar = live.fraction === null || live.fraction === undefined ? null
    : el("div", { class: "kw-bar", role: "progressbar", "aria-label": "Reading", "aria-valuemin": "0", "aria-valuemax": "100",
        "aria-valuenow": String(Math.round(live.fraction * 100)) }, el("span"));
  const node = el("div", { class: "kw-live", role: "status" }, el("p", {}, el("i", { class: "kw-pulse" }), el("span", {}, live.line)), bar);
  if (bar) bar.firstChild.style.transform = `scaleX(${live.fraction})`;
  return node;
}

// Put what `make` makes into `host` under `slot`, or take the old one away; nothing happens while `key` stays.
function place(host, slot, key, make) {
  const old = host.querySelector(`:scope > [data-slot="${slot}"]`);
  if ((old ? old.dataset.key : "") === key) return;
  old?.remove();
  if (!key) return;
  const node = make();
  node.dataset.key = key;
  put(host, slot, node);
}

const SLOTS = ["text", "live", "ending", "desk", "foot"];

function put(host, slot, node) {
  node.dataset.slot = slot;
  const later = SLOTS.slice(SLOTS.indexOf(slot) + 1).map((name) => `:scope > [data-slot="${name}"]`).join();
  host.insertBefore(node, later ? host.querySelector(later) : null);
}

function paintLive(host, live) {
  const old = host.querySelector(':scope > [data-slot="live"]');
  if (!live || !live.line) return old?.remove();
  const bar = old?.querySelector(".kw-bar");
  if (!old || !bar !== (live.fraction === null)) {
    old?.remove();
    return put(host, "live", progress(live));
  }
  const text = old.querySelector("p span");
  if (text.textContent !== live.line) text.textContent = live.line;
  if (bar) {
    bar.firstChild.style.transform = `scaleX(${live.fraction})`;
    bar.setAttribute("aria-valuenow", String(Math.round(live.fraction * 100)));
  }
}

function paintRow(element, mark, row, live) {
  const host = element.querySelector(".flex-wrap") || element;
  element.dataset.status = mark ? mark.status : "";
  const message = element.querySelector("[data-testid=user]");
  if (message) {
    const text = mark ? mark.text : null;
    place(message, "text", text === null ? "" : `=${text}`, () => el("div", { class: "kw-text" }, text));
  }
  paintLive(host, live);
  place(host, "ending", mark && (mark.error || mark.note) ? `${mark.id} ${mark.offer} ${mark.error || mark.note}` : "", () => ending(mark));
  const desk = kw.verbs?.deskOf(mark);
  element.dataset.desk = desk ? desk.kind : "";
  place(host, "desk", desk ? `${mark.id} ${desk.serial}` : "", () => desk.node);
  place(host, "foot", mark && kw.verbs ? footKey(mark) : "", () => foot(mark));
}

const footKey = (mark) => [mark.id, mark.status, mark.version, mark.offer, mark.stats?.line, mark.text].join(" ");

// The focus stays in its row, at what has the same name, when what had it is painted anew.
const nameOf = (node) => node.getAttribute("aria-label") || node.textContent;
let focused = null;

function noteFocus(event) {
  const row = event.target.closest?.("#chat .message-row");
  focused = row ? { row: [...chat.querySelectorAll(".message-row")].indexOf(row), name: nameOf(event.target) } : null;
}

function keepFocus(rows) {
  if (!focused || !rows.length || document.activeElement !== document.body) return;
  const row = rows[Math.min(focused.row, rows.length - 1)];
  const same = [...row.querySelectorAll("button, summary, textarea, input")].find((node) => nameOf(node) === focused.name);
  (same || row.querySelector(".kw-more"))?.focus({ preventScroll: true });
}

function paintEarlier() {
  const wrap = chat.querySelector(".message-wrap");
  const count = kw.marks.num_earlier || 0;
  const scroller = chat.querySelector(".bubble-wrap");
  if (!scroller) return;
  const old = scroller.querySelector(":scope > .kw-earlier");
  if (!wrap || !count) return old?.remove();
  if (old) return;
  scroller.prepend(el("button", { type: "button", class: "kw-earlier", onclick: () => kw.keepPlace(() => trigger("earlier", {})) }, "Show earlier messages"));
}

function paint() {
  const rows = chat.querySelectorAll(".message-row");
  const marks = kw.marks.rows || [];
  kw.verbs?.forget();
  rows.forEach((row, i) => paintRow(row, marks[i], i, i === rows.length - 1 ? kw.live : null));
  paintEarlier();
  keepFocus(rows);
}

const observer = new MutationObserver(() => repaint());
function repaint() {
  if (!chat) return;
  observer.disconnect();
  try { paint(); } finally { observer.observe(chat, { childList: true, subtree: true }); }
}

function boot() {
  chat = document.querySelector("#chat");
  if (!chat) return setTimeout(boot, 50);
  kw.repaint = repaint;
  document.addEventListener("focusin", noteFocus);
  document.addEventListener("pointerdown", () => { focused = null; }, true);
  repaint();
}

watch("value", () => { kw.marks = told(); repaint(); });
boot();
