// The list of conversations. Titles are set as text; rename and delete happen in the row itself.
const kw = window.keepwarm;
const { el } = kw;
let busy = false;

function row(item) {
  const open = el("button", { type: "button", class: "kw-open", onclick: () => { trigger("open", { id: item.id }); kw.picked(); } },
    el("span", { class: "kw-title" }, item.title), el("i", { class: "kw-dot" }));
  const act = (label, d, action) => el("button", { type: "button", class: "kw-act", "aria-label": `${label} “${item.title}”`, title: label, onclick: () => action(li, item) }, kw.icon(d));
  const li = el("li", { "data-id": item.id }, open, act("Rename", kw.paths.pencil, rename), act("Delete", kw.paths.bin, confirmDelete));
  return li;
}

function rename(li, item) {
  busy = true;
  const input = el("input", { class: "kw-rename", "aria-label": "New title", maxlength: "200" });
  input.value = item.title;
  const done = (save) => {
    if (!busy) return;
    busy = false;
    const title = input.value.trim();
    if (save && title && title !== item.title) trigger("rename", { id: item.id, title });
    paint(item.id);
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) { event.preventDefault(); done(true); }
    if (event.key === "Escape") { event.preventDefault(); done(false); }
  });
  input.addEventListener("blur", () => done(true));
  li.replaceChildren(input);
  input.focus();
  input.select();
}

function confirmDelete(li, item) {
  busy = true;
  const close = (remove) => { busy = false; if (remove) trigger("remove", { id: item.id }); paint(remove ? null : item.id); };
  const keep = el("button", { type: "button", class: "kw-keep", onclick: () => close(false) }, "Keep");
  const ask = el("div", { class: "kw-confirm", role: "group", "aria-label": `Delete “${item.title}”?` }, el("span", {}, "Delete this chat?"),
    el("button", { type: "button", class: "kw-delete", onclick: () => close(true) }, "Delete"), keep);
  ask.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.preventDefault(); close(false); } });
  li.replaceChildren(ask);
  keep.focus();
}

function mark() {
  const writing = new Set(kw.writing || []);
  element.querySelectorAll("li").forEach((li) => {
    const open = li.querySelector(".kw-open");
    if (!open) return;
    if (li.dataset.id === kw.shown.conversation) open.setAttribute("aria-current", "page");
    else open.removeAttribute("aria-current");
    const dot = writing.has(li.dataset.id);
    li.classList.toggle("writing", dot);
    if (dot) open.setAttribute("aria-description", "A reply is being written");
    else open.removeAttribute("aria-description");
  });
}

function paint(focusId) {
  const nav = element.querySelector("nav");
  if (!nav || busy) return;
  const { groups = [], note = null } = told();
  const place = nav.scrollTop;
  nav.replaceChildren(...groups.map((group) => el("section", {}, el("h2", {}, group.label), el("ul", {}, ...group.items.map(row)))),
    ...(note ? [el("p", { class: "kw-empty" }, note)] : []));
  nav.scrollTop = place;
  mark();
  if (focusId) nav.querySelector(`li[data-id="${CSS.escape(focusId)}"] .kw-open`)?.focus();
}

document.addEventListener("keepwarm:shown", mark);
document.addEventListener("keepwarm:writing", mark);
watch("value", () => paint());
paint();
