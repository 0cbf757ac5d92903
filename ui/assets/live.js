// The line in the place of a reply that has no text yet; marks.js paints it under the last row. Its beat is
// the sign that somebody still tells this tab of its reply: without it, a follower is asked for again, and
// when that does not help, the page loads itself anew, which keeps what was typed.
const kw = window.keepwarm;
const CHECK_MS = 1000;
const SILENCE_MS = 4000;
const MOST_TRIES = 3;
let heard = Date.now();
let tries = 0;

function hear() {
  heard = Date.now();
  tries = 0;
}

// Only from a server that answers: the browser's own error page would stand in place of the chat, and stay.
function loadAgain() {
  fetch(location.pathname, { method: "HEAD", cache: "no-store" }).then(() => location.reload(), () => {});
}

setInterval(() => {
  if (!kw.shown.writing || document.hidden) return hear();
  if (Date.now() - heard < SILENCE_MS) return;
  heard = Date.now();
  if (++tries > MOST_TRIES) loadAgain();
  else trigger("silence", {});
}, CHECK_MS);

document.addEventListener("keepwarm:shown", hear);
watch("value", () => { hear(); kw.live = told(); kw.repaint(); });
