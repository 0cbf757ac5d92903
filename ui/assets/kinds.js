// How the cache of this chat is kept: asked for when the drawer opens and, while it is open, when another chat is
// shown, a reply has ended, or figures are being measured. A change is told its cost in place before it is made.
const kw = window.keepwarm;
const { el } = kw;
const root = document.documentElement;
let isOpen = false;
let wanted = null;
let isUnfolded = false;
let asking = null;
let writing = new Set();

const ASK_EVERY_MS = 2000;

const ask = () => trigger("look", {});

// Figures come one by one, and nothing else on the page changes with them.
function keepAsking(isWanted) {
  if (isWanted && !asking) asking = setInterval(() => { if (isOpen) ask(); }, ASK_EVERY_MS);
  if (isWanted || !asking) return;
  clearInterval(asking);
  asking = null;
}

function choose(kind) {
  wanted = null;
  trigger("choose", { kind });
}

function confirmation(row) {
  return el("div", { class: "kw-change", role: "group", "aria-label": `Change to ${row.name}` },
    el("p", {}, row.cost),
    el("div", { class: "kw-choice" },
      el("button", { type: "button", class: "kw-do", onclick: () => choose(row.kind) }, `Use ${row.name.toLowerCase()}`),
      el("button", { type: "button", onclick: () => { wanted = null; paint(); } }, "Cancel")));
}

function picked(row) {
  if (row.in_use) wanted = null;
  else if (row.cost) wanted = row.kind;
  else return choose(row.kind);
  paint();
  if (wanted) ask(); // what it costs may have changed since it was told
}

function option(row) {
  const isChecked = wanted ? row.kind === wanted : row.in_use;
  const input = el("input", { type: "radio", name: "cache-kind", value: row.kind, disabled: Boolean(row.reason), onchange: () => picked(row) });
  input.checked = isChecked;
  const marks = [[row.in_use && wanted, "In use"], [row.is_recommended, "Recommended"]]
    .filter(([shown]) => shown).map(([, text]) => el("span", { class: "kw-mark" }, text));
  const label = el("label", {}, input,
    el("span", { class: "kw-title" }, row.name, ...marks),
    el("span", { class: "kw-line", "data-short": row.is_short }, row.line),
    row.quality ? el("span", { class: "kw-quality", "data-bad": row.is_bad, title: row.quality_detail || null }, row.quality) : null,
    row.reason ? el("span", { class: "kw-reason" }, row.reason) : null);
  return el("li", { "data-kind": row.kind, "data-off": Boolean(row.reason) }, label, wanted === row.kind ? confirmation(row) : null);
}

const options = (label, rows) => el("ul", { role: "radiogroup", "aria-label": label }, ...rows.map(option));

// What cannot be had here is folded away, with what would change that.
function unavailable(rows) {
  if (!rows.length) return null;
  const installs = [...new Set(rows.map((row) => row.install).filter(Boolean))];
  const details = el("details", {}, el("summary", {}, rows.length === 1 ? "1 kind is not available here" : `${rows.length} kinds are not available here`),
    ...installs.map((install) => el("p", { class: "kw-more" }, "To have them, stop the app, run ", el("code", {}, install), " and start it again.")),
    options("Kinds that are not available here", rows));
  details.open = isUnfolded;
  details.addEventListener("toggle", () => { isUnfolded = details.open; });
  return details;
}

function shrinkSwitch(allowed) {
  const input = el("input", { type: "checkbox", role: "switch", onchange: () => trigger("shrink", { allowed: input.checked }) });
  input.checked = allowed;
  return el("label", { class: "kw-shrink" }, input, el("span", {}, "Use a smaller cache when memory runs out"),
    el("span", { class: "kw-line" }, "Otherwise the reply stops there, and what was written is kept."));
}

function measuring({ measuring, to_measure }) {
  if (measuring) return el("p", { class: "kw-more", role: "status" }, "Answers are being measured while nobody waits for a reply…");
  if (!to_measure) return null;
  return el("button", { type: "button", class: "kw-measure", onclick: () => trigger("measure", {}) }, "Measure answers");
}

function paint() {
  const section = element.querySelector("section");
  const panel = told();
  if (!section || !panel.rows) return;
  keepAsking(panel.measuring);
  if (!panel.rows.some((row) => row.kind === wanted && !row.in_use)) wanted = null;
  const active = section.contains(document.activeElement) ? document.activeElement : null;
  const back = active && (active.value && active.type === "radio" ? `input[value="${CSS.escape(active.value)}"]` : active.type === "checkbox" ? ".kw-shrink input" : null);
  section.replaceChildren(...[
    panel.notice ? el("p", { class: "kw-notice" }, panel.notice) : null,
    panel.rows.length ? options("Kind of cache", panel.rows.filter((row) => !row.reason)) : null,
    panel.rows.length ? measuring(panel) : null,
    unavailable(panel.rows.filter((row) => row.reason)),
    panel.rows.length ? shrinkSwitch(panel.shrink) : null,
  ].filter(Boolean));
  if (back) section.querySelector(back)?.focus({ preventScroll: true });
}

function look() {
  const opened = root.classList.contains("drawer-open");
  if (opened && !isOpen) ask();
  isOpen = opened;
}

document.addEventListener("keepwarm:writing", () => {
  const now = new Set(kw.writing || []);
  const hasEnded = [...writing].some((id) => !now.has(id));
  writing = now;
  if (isOpen && (hasEnded || root.dataset.model === "ready" && told().rows?.length === 0)) ask();
});
document.addEventListener("keepwarm:shown", (event) => {
  if (!event.detail.moved) return;
  wanted = null;
  if (isOpen) ask();
});

new MutationObserver(look).observe(root, { attributes: true, attributeFilter: ["class"] });
watch("value", paint);
paint();
look();
