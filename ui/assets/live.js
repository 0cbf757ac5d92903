// The line in the place of a reply that has no text yet; marks.js paints it under the last row.
watch("value", () => { window.keepwarm.live = props.value || {}; window.keepwarm.repaint(); });
