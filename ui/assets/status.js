// The bar on top, the notice above the composer, the model in the drawer, and the dots in the list.
const kw = window.keepwarm;
const byId = (id) => document.getElementById(id);

function facts(model) {
  const rows = [["Name", model.name], ["Status", { ready: "Ready", loading: "Loading", failed: "Failed" }[model.state]]];
  if (model.device) rows.push(["Device", model.device]);
  if (model.dtype) rows.push(["Precision", model.dtype]);
  if (model.num_context_tokens) rows.push(["Context", `${model.num_context_tokens.toLocaleString("en-US")} tokens`]);
  if (model.kv_bytes_per_token) rows.push(["Cache", `${Math.max(1, Math.round(model.kv_bytes_per_token / 1024)).toLocaleString("en-US")} KB per token`]);
  return rows.filter(([, value]) => value);
}

function modelNotice(model) {
  if (model.state === "ready") return "";
  return model.detail || (model.state === "loading" ? "The model is loading…" : "The model could not be loaded.");
}

// The model first; what did not change is left alone, so that a screen reader says each sentence once.
function paintNotices(model, saving) {
  const notice = document.querySelector("#notice .html-container > div > div");
  if (!notice) return;
  const wanted = [[modelNotice(model), model.state === "failed" ? "alert" : "status"], [saving, "status"]].filter(([text]) => text);
  const same = ([text, role], index) => notice.children[index]?.textContent === text && notice.children[index].getAttribute("role") === role;
  if (notice.children.length === wanted.length && wanted.every(same)) return;
  notice.replaceChildren(...wanted.map(([text, role]) => kw.el("p", { role }, text)));
}

function paint() {
  const { model, writing, saving } = told();
  if (!model) return;
  document.documentElement.dataset.model = model.state;
  const chip = byId("model-chip");
  if (chip && chip.textContent !== model.name) chip.textContent = model.name;
  if (chip) chip.title = [model.name, model.device, model.dtype].filter(Boolean).join(" · ");
  const list = byId("model-facts");
  if (list) list.replaceChildren(...facts(model).flatMap(([label, value]) => [kw.el("dt", {}, label), kw.el("dd", {}, value)]));
  paintNotices(model, saving || "");
  kw.writing = writing || [];
  document.dispatchEvent(new CustomEvent("keepwarm:writing"));
}

watch("value", paint);
paint();
kw.syncPanels();
