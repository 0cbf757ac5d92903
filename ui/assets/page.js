// What all parts of the page share: the address, small DOM helpers, panels, keys. Loaded before the parts.
// Text of people and models reaches the document through text nodes only.
(() => {
  const kw = (window.keepwarm = { shown: {}, marks: {}, live: {}, repaint: () => {} });
  const byId = (id) => document.getElementById(id);
  const touch = window.matchMedia("(pointer: coarse)");
  const narrow = window.matchMedia("(max-width: 860px)");

  // el("button", {class: "x", onclick: f}, "text", child): attributes, listeners, children.
  kw.el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };

  kw.icon = (path) => {
    const ns = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(ns, "svg");
    svg.setAttribute("viewBox", "0 0 24 24");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(ns, "path");
    line.setAttribute("d", path);
    svg.append(line);
    return svg;
  };

  // Drawings that several parts have.
  kw.paths = { pencil: "M5 19l1-4L16 5l3 3L9 18z", bin: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12" };

  // The conversation of a tab lives in its address, so a reload or a restart of the app keeps it.
  kw.fromAddress = () => JSON.stringify({ conversation: new URLSearchParams(location.search).get("chat") });

  kw.show = (shown) => {
    const before = kw.shown.conversation;
    kw.shown = shown;
    for (const [name, on] of [["kw-writing", shown.writing], ["kw-can-undo", shown.canUndo], ["kw-can-redo", shown.canRedo]]) {
      document.documentElement.classList.toggle(name, Boolean(on));
    }
    const address = new URL(location.href);
    if (kw.shown.conversation) address.searchParams.set("chat", kw.shown.conversation);
    else address.searchParams.delete("chat");
    if (address.href !== location.href) history.replaceState(history.state, "", address);
    const title = kw.shown.title || "";
    document.title = title ? `${title} · Keepwarm` : "Keepwarm";
    if (byId("chat-title")) byId("chat-title").textContent = title;
    if (!kw.ready) { kw.ready = true; kw.restoreDraft(); }
    document.dispatchEvent(new CustomEvent("keepwarm:shown", { detail: { moved: before !== kw.shown.conversation } }));
  };

  // Panels: the sidebar is open on wide windows unless closed there, both are closed on phones at first.
  const remembered = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
  const remember = (name, value) => { try { localStorage.setItem(name, value); } catch { /* private mode */ } };
  const isOpen = (panel) => document.documentElement.classList.contains(`${panel}-open`);
  const setOpen = (panel, open) => {
    document.documentElement.classList.toggle(`${panel}-open`, open);
    byId(`toggle-${panel}`)?.setAttribute("aria-expanded", String(open));
  };
  kw.toggle = (panel, open = !isOpen(panel)) => {
    if (open && narrow.matches) setOpen(panel === "sidebar" ? "drawer" : "sidebar", false);
    setOpen(panel, open);
    if (panel === "sidebar" && !narrow.matches) remember("keepwarm.sidebar", open ? "open" : "closed");
  };
  kw.picked = () => {
    if (narrow.matches) kw.toggle("sidebar", false);
    // With a touch screen a focus would open the keyboard over the chat.
    if (!touch.matches) byId("message")?.querySelector("textarea")?.focus({ preventScroll: true });
  };
  kw.arrange = () => {
    setOpen("sidebar", !narrow.matches && remembered("keepwarm.sidebar") !== "closed");
    setOpen("drawer", false);
  };
  kw.syncPanels = () => ["sidebar", "drawer"].forEach((panel) => setOpen(panel, isOpen(panel)));
  narrow.addEventListener("change", () => kw.arrange());
  kw.arrange();

  document.addEventListener("click", (event) => {
    const target = event.target.closest("#toggle-sidebar, #toggle-drawer, #close-drawer, #scrim, #new-chat");
    if (!target) return;
    if (target.id === "toggle-sidebar") kw.toggle("sidebar");
    if (target.id === "toggle-drawer") kw.toggle("drawer");
    if (target.id === "close-drawer") { kw.toggle("drawer", false); byId("toggle-drawer")?.focus(); }
    if (target.id === "scrim") { kw.toggle("sidebar", false); kw.toggle("drawer", false); }
    if (target.id === "new-chat") kw.picked();
  });

  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented) return;
    if (event.key !== "Escape") return;
    if (isOpen("drawer")) kw.toggle("drawer", false);
    else if (narrow.matches && isOpen("sidebar")) kw.toggle("sidebar", false);
    else if (kw.shown.writing) document.querySelector("#message [data-testid=stop-button]")?.click();
  });

  // Gradio reloads the page when a lost server is back: what was typed and not sent is put back then.
  const DRAFT = "keepwarm.draft";
  const composer = (kw.composer = () => document.querySelector("#message textarea"));
  kw.write = (text) => {
    composer().value = text;
    composer().dispatchEvent(new Event("input", { bubbles: true }));
  };
  window.addEventListener("pagehide", () => {
    try { sessionStorage.setItem(DRAFT, composer()?.value ?? ""); } catch { /* private mode */ }
  });
  kw.restoreDraft = () => {
    let draft = "";
    try { draft = sessionStorage.getItem(DRAFT) ?? ""; sessionStorage.removeItem(DRAFT); } catch { /* private mode */ }
    if (draft && composer() && !composer().value) kw.write(draft);
  };

  // Gradio gives these buttons no name.
  const names = [
    ["#message [data-testid=submit-button], #message .submit-button", "Send message"],
    ["#message [data-testid=stop-button], #message .stop-button", "Stop"],
  ];
  const nameThem = () => names.forEach(([where, name]) => document.querySelectorAll(where).forEach((node) => {
    if (node.getAttribute("aria-label") !== name) node.setAttribute("aria-label", name);
  }));
  new MutationObserver(nameThem).observe(document, { childList: true, subtree: true });
})();
