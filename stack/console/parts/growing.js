// A long text that grows, as it is: in segments, so that a frame lays out only the last one again.

import { html, useRef } from "../vendor/preact.js";

const SEGMENT_CHARS = 4000;

/** Cut after the last line break of each segment, or its last space; cuts stay where they are while the text grows. */
function segmentsOf(text, from) {
  const segments = [];
  let start = from;
  while (text.length - start > SEGMENT_CHARS) {
    const part = text.slice(start, start + SEGMENT_CHARS);
    const end = Math.max(part.lastIndexOf("\n"), 0) || Math.max(part.lastIndexOf(" "), 0) || SEGMENT_CHARS - 1;
    segments.push(part.slice(0, end + 1));
    start += end + 1;
  }
  return [...segments, text.slice(start)];
}

export function Growing({ text }) {
  const before = useRef({ head: "", segments: [] });
  const { head, segments } = before.current;
  const all = text.startsWith(head) ? [...segments, ...segmentsOf(text, head.length)] : segmentsOf(text, 0);
  before.current = { head: text.slice(0, text.length - all.at(-1).length), segments: all.slice(0, -1) };
  return html`<div class="growing">${all.map((segment, index) => html`<p class="wrap" key=${index}>${segment}</p>`)}</div>`;
}
