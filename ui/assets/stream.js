// Gradio's client reads all answers from one stream, which the server closes when nothing is due. An action
// that is accepted just then is lost: the client still holds the stream for open, and nobody opens the next
// one. So a close that comes while an answer is due is kept from the client, and reading goes on.
(() => {
  const plainFetch = window.fetch.bind(window);
  const due = new Set();

  const pathOf = (input) => new URL(input instanceof Request ? input.url : input, location.href).pathname;

  async function join(input, options) {
    const answer = await plainFetch(input, options);
    if (answer.ok) due.add((await answer.clone().json()).event_id);
    return answer;
  }

  // Pass on what the server sends. True when it closed the stream although an answer is due.
  async function passOn(body, controller) {
    const encoder = new TextEncoder();
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return false;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const message = JSON.parse(event.replace(/^data: /, ""));
        if (message.msg === "process_completed") due.delete(message.event_id);
        if (message.msg === "unexpected_error") due.clear();
        if (message.msg === "close_stream" && due.size) return true;
        controller.enqueue(encoder.encode(`${event}\n\n`));
      }
    }
  }

  async function stream(input, options) {
    const request = new Request(input, options);
    const first = await plainFetch(request.clone());
    if (!first.ok || !first.body) return first;
    const start = async (controller) => {
      try {
        let answer = first;
        while (await passOn(answer.body, controller)) answer = await plainFetch(request.clone());
        controller.close();
      } catch (error) {
        controller.error(error);
      }
    };
    return new Response(new ReadableStream({ start: (controller) => { start(controller); } }), first);
  }

  window.fetch = (input, options) => {
    const path = pathOf(input);
    if (path.endsWith("/queue/join")) return join(input, options);
    return path.endsWith("/queue/data") ? stream(input, options) : plainFetch(input, options);
  };
})();
