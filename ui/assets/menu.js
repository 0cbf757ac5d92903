// One menu for the whole page: items next to the button that opened it, for mouse, touch and keyboard.
(() => {
  const kw = window.keepwarm;
  const menu = kw.el("div", { class: "kw-menu", role: "menu", popover: "auto" });
  let opener = null;

  // `items`: { name, icon, run, danger }.
  kw.showMenu = (from, items) => {
    menu.replaceChildren(...items.map(({ name, icon, run, danger }) =>
      kw.el("button", { type: "button", role: "menuitem", tabindex: "-1", class: danger ? "kw-danger" : null, onclick: () => { menu.hidePopover(); run(); } }, kw.icon(icon), name)));
    if (!menu.isConnected) document.body.append(menu);
    opener = from;
    menu.showPopover();
    place();
    from.setAttribute("aria-expanded", "true");
    menu.firstChild.focus({ preventScroll: true });
  };
  kw.hideMenu = () => { if (menu.isConnected) menu.hidePopover(); };

  // Next to its button, also while the chat moves under it.
  function place() {
    if (!menu.isConnected || !menu.matches(":popover-open") || !opener.isConnected) return;
    const at = opener.getBoundingClientRect();
    const isBelow = at.bottom + 6 + menu.offsetHeight < window.innerHeight - 8;
    menu.style.top = `${isBelow ? at.bottom + 6 : Math.max(8, at.top - 6 - menu.offsetHeight)}px`;
    menu.style.left = `${Math.max(8, Math.min(at.right - menu.offsetWidth, window.innerWidth - menu.offsetWidth - 8))}px`;
  }

  menu.addEventListener("toggle", (event) => event.newState === "closed" && opener?.setAttribute("aria-expanded", "false"));
  menu.addEventListener("keydown", (event) => {
    const items = [...menu.children];
    const at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 + items.length, Home: 0, End: items.length - 1 }[event.key];
    if (event.key === "Escape" || event.key === "Tab") menu.hidePopover();
    if (event.key === "Escape" || to !== undefined) event.preventDefault();
    if (to !== undefined) items[to % items.length].focus();
  });
  document.addEventListener("scroll", place, { capture: true, passive: true });
})();
