// What can be done with a message: the tools under its row, their menu, and the desk, which is the one thing
// that is open in the chat: an editor, a field, a question. marks.js puts tools and desk into the rows. An act
// names its message by id here and by row on its way; its answer carries its number (see ui/verbs.py).
const kw = window.keepwarm;
const { el } = kw;
const ICONS = {
  copy: "M9 9h10.5v10.5H9zM5 15.5V4.5h10.5",
  again: "M19.5 12a7.5 7.5 0 1 1-2.3-5.4M19.5 3.5v4h-4",
  edit: kw.paths.pencil,
  more: "M5.5 12h.01M12 12h.01M18.5 12h.01",
  begin: "M5 5v14M10 12h9.5M15.5 8l4 4-4 4",
  forth: "M8 5.5l9 6.5-9 6.5z",
  fork: "M7 20V4M7 14.5c6.5 0 9.5-2.5 9.5-8M13 9.5l3.5-3.5 3.5 3.5",
  remove: kw.paths.bin,
  done: "M5 12.5l4.5 4.5L19 7.5",
};
const WRITING = new Set(["regenerate", "edit", "go_on"]);
const TWICE_MS = 500;
const LONGEST = "1000000";
const LONGEST_BEGINNING = "2000";
const compact = window.matchMedia("(max-width: 860px), (pointer: coarse)");
const touch = window.matchMedia("(pointer: coarse)");
let pending = null;
let last = {};
let desk = null;
let number = 0;
let putBack = "";

const rowOf = (id) => (kw.marks.rows || []).findIndex((mark) => mark.id === id);
const rowAt = (row) => document.querySelectorAll("#chat .message-row")[row];

// The second click of a double click does not ask for another reply.
function act(verb, id, more = {}) {
  const row = rowOf(id);
  const isTwice = WRITING.has(verb) && !more.sure && last.verb === verb && Date.now() - last.at < TWICE_MS;
  if (row < 0 || isTwice) return;
  last = { verb, at: Date.now() };
  pending = { number: ++number, verb, id, more };
  trigger(verb, { row, number, ...more });
}

function actOnChat(verb) {
  pending = { number: ++number, verb };
  trigger(verb, { number });
}

function hear(answer) {
  if (!pending || answer.number !== pending.number) return;
  const { verb, id, more } = pending;
  pending = null;
  if ("back" in answer) takeBack(answer.back);
  if ("text" in answer) edit(id, answer.text);
  if (answer.ask) ask(id, answer.ask, "Go on", "Cancel", () => act(verb, id, { ...more, sure: true }));
  if (answer.done && desk?.id === id) close();
  if (answer.done && WRITING.has(verb)) kw.goToEnd();
}

// The text of an undone question goes into the box, but never over somebody's own words.
function takeBack(text) {
  const box = kw.composer();
  if (!box || (box.value.trim() && box.value !== putBack)) return;
  kw.write(text);
  putBack = text;
}

// Words in an editor that were not sent: they survive another chat, another version and a reload.
const EDITS = "keepwarm.edits";
const drafts = new Map();
let toOpen = null;
try {
  const kept = JSON.parse(sessionStorage.getItem(EDITS)) || { texts: [] };
  kept.texts.forEach(([id, text]) => drafts.set(id, text));
  toOpen = kept.open;
  sessionStorage.removeItem(EDITS);
} catch { /* private mode */ }
window.addEventListener("pagehide", () => {
  const open = desk?.kind === "edit" && drafts.has(desk.id) ? desk.id : null;
  try { if (drafts.size) sessionStorage.setItem(EDITS, JSON.stringify({ open, texts: [...drafts] })); } catch { /* private mode */ }
});

function openAgain() {
  const mark = kw.marks.rows?.[rowOf(toOpen)];
  if (!mark) return;
  toOpen = null;
  queueMicrotask(() => editIt(mark));
}

// The desk

function open(id, kind, ...children) {
  const node = el("div", { class: "kw-desk", "data-kind": kind }, ...children);
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    event.preventDefault();
    leave();
  });
  desk = { id, kind, node, serial: ++number };
  kw.repaint();
  node.scrollIntoView({ block: "nearest" });
}

function close() {
  drafts.delete(desk?.id);
  desk = null;
  kw.repaint();
}

// Closed by whoever opened it, who finds the focus where it was before.
function leave() {
  const row = rowAt(rowOf(desk.id));
  const from = desk.kind === "edit" && !compact.matches ? "Edit" : "More";
  close();
  row?.querySelector(`.kw-tools [aria-label=${from}]`)?.focus({ preventScroll: true });
}

const buttons = (...each) => el("span", { class: "kw-buttons" }, ...each);
const button = (label, onclick, kind = "") => el("button", { type: "button", class: `kw-button ${kind}`, onclick }, label);

// In place of the buttons of what is open there, or alone.
function ask(id, line, yes, no, go, { danger = false } = {}) {
  const old = desk?.id === id ? desk.node.querySelector(".kw-actions") : null;
  const back = () => { if (!old) return leave(); bar.replaceWith(old); old.querySelector(".kw-first")?.focus(); };
  const first = button(yes, go, danger ? "kw-danger" : "kw-first");
  const second = button(no, back);
  const bar = el("div", { class: "kw-ask", role: "group", "aria-label": line }, el("p", { role: "alert" }, line), buttons(second, first));
  if (old) old.replaceWith(bar);
  else open(id, "ask", bar);
  (danger ? second : first).focus({ preventScroll: true });
}

function edit(id, text) {
  const row = rowOf(id);
  const mark = kw.marks.rows?.[row];
  if (!mark) return;
  const isReply = mark.role === "assistant";
  const follows = row < kw.marks.rows.length - 1;
  const area = el("textarea", { class: "kw-area", rows: "2", maxlength: LONGEST, "aria-label": isReply ? "Edit reply" : "Edit message" });
  area.value = text;
  const before = area.value;
  if (drafts.has(id)) area.value = drafts.get(id);
  area.addEventListener("input", () => (area.value === before ? drafts.delete(id) : drafts.set(id, area.value)));
  const save = (keepRest) => {
    if (!area.value.trim() || area.value === before) return leave();
    act(isReply ? "edit_reply" : "edit", id, { text: area.value, keepRest });
  };
  const saves = !isReply ? [button("Send", () => save(false), "kw-first")]
    : !follows ? [button("Save", () => save(true), "kw-first")]
    : [button("Save as a branch that ends here", () => save(false)), button("Save and keep what follows", () => save(true), "kw-first")];
  saves.at(-1).title = "Ctrl+Enter";
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    save(isReply);
  });
  open(id, "edit", area, el("div", { class: "kw-actions" }, el("p", {}, "The version before stays."), buttons(button("Cancel", leave), ...saves)));
  area.focus({ preventScroll: true });
  area.setSelectionRange(area.value.length, area.value.length);
}

function begin(mark) {
  const field = el("input", { class: "kw-field", type: "text", maxlength: LONGEST_BEGINNING, "aria-label": "The new reply starts with", placeholder: "The new reply starts with…" });
  const go = () => { if (field.value.trim()) act("regenerate", mark.id, { text: field.value }); else field.focus(); };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    go();
  });
  open(mark.id, "begin", field, el("div", { class: "kw-actions" }, buttons(button("Cancel", leave), button("Regenerate", go, "kw-first"))));
  field.focus({ preventScroll: true });
}

function remove(mark) {
  const what = mark.role === "assistant" ? "this reply" : "this message";
  const rest = rowOf(mark.id) < kw.marks.rows.length - 1 ? " and what follows it" : "";
  close();
  ask(mark.id, `Delete ${what}${rest} for ever?`, "Delete", "Keep", () => act("delete_branch", mark.id), { danger: true });
}

// The tools and their menu

function copy(mark) {
  const row = rowAt(rowOf(mark.id));
  row?.nextElementSibling?.querySelector("button.icon-button")?.click();
  const tool = row?.querySelector(".kw-tools [aria-label=Copy]");
  if (!tool) return;
  tool.replaceChildren(kw.icon(ICONS.done));
  tool.setAttribute("aria-label", "Copied");
  setTimeout(() => { tool.replaceChildren(kw.icon(ICONS.copy)); tool.setAttribute("aria-label", "Copy"); }, 1600);
}

const editIt = (mark) => (mark.text === null ? act("text", mark.id) : edit(mark.id, mark.text));
const isReply = (mark) => mark.role === "assistant";
const always = () => true;
const TOOLS = [
  { name: "Copy", icon: ICONS.copy, fits: (mark) => mark.status !== "running", run: copy },
  { name: "Regenerate", icon: ICONS.again, fits: isReply, run: (mark) => act("regenerate", mark.id) },
  { name: "Edit", icon: ICONS.edit, fits: always, run: editIt },
];
const MENU = [
  { name: "Regenerate, starting with…", icon: ICONS.begin, fits: isReply, run: begin },
  { name: "Continue", icon: ICONS.forth, fits: (mark) => mark.offer === "continue", run: (mark) => act("go_on", mark.id) },
  { name: "Fork here", icon: ICONS.fork, fits: always, run: (mark) => act("fork", mark.id) },
  { name: "Delete this branch…", icon: ICONS.remove, fits: always, run: remove, danger: true },
];

function tools(mark) {
  const each = ({ name, icon, run }) => el("button", { type: "button", class: "kw-tool", "aria-label": name, title: name, onclick: () => run(mark) }, kw.icon(icon));
  const more = el("button", { type: "button", class: "kw-tool kw-more", "aria-label": "More", title: "More", "aria-haspopup": "menu", "aria-expanded": "false", onclick: () => showMenu(more, mark) }, kw.icon(ICONS.more));
  return el("span", { class: "kw-tools", role: "group", "aria-label": "Message" }, ...TOOLS.filter((tool) => tool.fits(mark)).map(each), more);
}

function showMenu(from, mark) {
  const items = (compact.matches ? [...TOOLS, ...MENU] : MENU).filter((item) => item.fits(mark));
  kw.showMenu(from, items.map((item) => ({ ...item, run: () => item.run(mark) })));
}

// Undo and redo

const can = (verb) => Boolean(verb === "undo" ? kw.shown.canUndo : kw.shown.canRedo);

document.addEventListener("click", (event) => {
  const verb = event.target.closest?.("#undo, #redo")?.id;
  if (!verb) return;
  actOnChat(verb);
  if (event.detail > 0 && !touch.matches) kw.composer()?.focus({ preventScroll: true });
});
document.addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.altKey || event.defaultPrevented) return;
  if (event.target.closest?.("input, textarea, select, [contenteditable]")) return;
  const key = event.key.toLowerCase();
  const verb = key === "z" ? (event.shiftKey ? "redo" : "undo") : key === "y" && !event.shiftKey ? "redo" : null;
  if (!verb || !can(verb)) return;
  event.preventDefault();
  actOnChat(verb);
});

kw.verbs = {
  act,
  tools,
  // What is open under this message, as a key for marks.js and a node that stays the same one.
  deskOf: (mark) => (desk && mark && desk.id === mark.id ? desk : null),
  forget: () => {
    if (desk && rowOf(desk.id) < 0) desk = null;
    if (toOpen) openAgain();
  },
};
document.addEventListener("keepwarm:shown", (event) => {
  if (!event.detail.moved) return;
  desk = null;
  kw.hideMenu();
});
watch("value", () => hear(told()));
// The events of this part, for Gradio: "regenerate" "edit" "edit_reply" "go_on" "text" "fork" "delete_branch" "version" "undo" "redo"
kw.repaint();
