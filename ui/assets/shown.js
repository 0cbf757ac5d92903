// Takes over what this tab shows, and keeps the end of the chat in view for a reader who is there.
const kw = window.keepwarm;
const NEAR = 48;
let scroller = null;
let following = true;
let last = 0;
let heightBelow = null;

const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;

// Only a move upwards means that the reader left the end; growing text never does. Asked before every
// jump too, because an update may come between a reader's scroll and its event.
function notice() {
  if (scroller.scrollTop < last - 2) following = atEnd();
  else if (atEnd()) following = true;
  last = scroller.scrollTop;
}

function toEnd() {
  if (!scroller) return;
  if (scroller.scrollTop < last - 2) notice();
  if (!following) return;
  scroller.scrollTop = scroller.scrollHeight;
  last = scroller.scrollTop;
}

function goToEnd() {
  following = true;
  last = 0;
  requestAnimationFrame(toEnd);
}
kw.goToEnd = goToEnd;

function attach() {
  scroller = document.querySelector("#chat .bubble-wrap");
  if (!scroller) return setTimeout(attach, 50);
  scroller.addEventListener("scroll", notice, { passive: true });
  scroller.addEventListener("wheel", (event) => { if (event.deltaY < 0) following = false; }, { passive: true });
  new MutationObserver(toEnd).observe(scroller, { childList: true, subtree: true, characterData: true });
  new ResizeObserver(toEnd).observe(scroller);
  toEnd();
}

// Run a change that adds rows on top, and leave the reader where they were.
kw.keepPlace = (change) => {
  following = false;
  heightBelow = scroller ? scroller.scrollHeight - scroller.scrollTop : null;
  change();
};

document.addEventListener("keepwarm:shown", (event) => {
  if (event.detail.moved) return goToEnd();
  if (heightBelow === null || !scroller) return requestAnimationFrame(toEnd);
  const below = heightBelow;
  heightBelow = null;
  requestAnimationFrame(() => { last = 0; scroller.scrollTop = scroller.scrollHeight - below; });
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && event.target.closest?.("#message")) goToEnd();
}, true);
document.addEventListener("click", (event) => {
  if (event.target.closest?.("#message .submit-button, #chat button[aria-label='Scroll down']")) goToEnd();
}, true);

watch("value", () => kw.show(told()));
attach();
