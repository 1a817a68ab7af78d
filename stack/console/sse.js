// Server-sent events from the body of a fetch: https://html.spec.whatwg.org/multipage/server-sent-events.html

import { hasTime, nextTask } from "./slices.js";

/** Yield {event, size, at} for each event of `body` but the last, `[DONE]`. `size` is the number of characters.
 * A chunk of many events is read in slices, its consumer's work included. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const at = performance.now();
      pending += value;
      let start = 0;
      for (let end = pending.indexOf("\n\n"); end >= 0; end = pending.indexOf("\n\n", start)) {
        const data = dataOf(pending.slice(start, end));
        start = end + 2;
        if (data === "[DONE]") return;
        if (data) yield { event: JSON.parse(data), size: data.length, at };
        if (!hasTime()) await nextTask();
      }
      pending = pending.slice(start);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(block) {
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data += (data && "\n") + line.slice(line[5] === " " ? 6 : 5);
  }
  return data;
}
