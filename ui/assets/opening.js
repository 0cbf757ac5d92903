// Until the server has said what this tab shows, an action would be about the wrong chat, and the late
// answer would wipe its result away. What somebody does before is held back, and done then; the last one
// counts. The gate opens after a failed answer too: the page is usable then, only empty.
(() => {
  const kw = window.keepwarm;
  const BUTTONS = "#message .submit-button, #new-chat, #save-system-prompt, #chat .example";
  const send = () => document.querySelector("#message .submit-button")?.click();
  let held = null;

  const hold = (event, action) => {
    event.preventDefault();
    event.stopImmediatePropagation();
    held = action;
  };
  const onClick = (event) => {
    const button = event.target.closest?.(BUTTONS);
    if (button) hold(event, button.matches(".submit-button") ? send : () => button.click());
  };
  const onKey = (event) => {
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
    if (sends && event.target.closest?.("#message")) hold(event, send);
  };
  window.addEventListener("click", onClick, true);
  window.addEventListener("keydown", onKey, true);
  window.addEventListener("keypress", onKey, true);

  kw.arrived = () => {
    window.removeEventListener("click", onClick, true);
    window.removeEventListener("keydown", onKey, true);
    window.removeEventListener("keypress", onKey, true);
    held?.();
    held = null;
  };
})();
