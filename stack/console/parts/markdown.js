// Markdown of a model as it grows: cut into blocks, each parsed in slices of time and cleaned, see clean.js.

import { hasTime, later } from "../slices.js";
import { html, useEffect, useMemo, useReducer, useRef, useState } from "../vendor/preact.js";
import { clean } from "./clean.js";
import { Growing } from "./growing.js";
import { loadedVersion, lookingForMissing, onLoaded } from "./late.js";
import { Sources, withMarks } from "./sources.js";

// The expressions of the parser are compiled by their first use: before an answer, not with its first frame.
later(() => clean("# a\n\n- **b** `c` [d](e)\n\n| f |\n|---|\n| g |\n\n```\nh\n```\n"));

const CHUNK_CHARS = 1500;
const MOST_PARSED_AGAIN = 4000;
const MOST_LAID_OUT = 24_000;

/** Cut a text into chunks of whole blocks, so that a stream parses only its last one again: cuts stay where they are
 * while the text grows. A fence and a quotation are kept together, a list until it is twice too long: it is then cut between items.
 * The last line never begins a chunk: what has come of it may not show yet what it is. */
export function chunksOf(text) {
  const chunks = [];
  let fence = false;
  let start = 0;
  let position = 0;
  let afterBlank = false;
  for (const line of text.split("\n")) {
    if (/^\s*(?:```|~~~)/.test(line)) fence = !fence;
    const begins = afterBlank && (!fence || /^(?:```|~~~)/.test(line)) && /^(?![\s>]|[-*+] |\d+[.)] )/.test(line);
    const isLongList = !fence && position - start > 2 * CHUNK_CHARS && /^(?:[-*+]|\d+[.)]) /.test(line);
    const isWhole = position + line.length < text.length;
    if (isWhole && (isLongList || (begins && line && position - start > CHUNK_CHARS))) {
      chunks.push(text.slice(start, position));
      start = position;
    }
    if (line) afterBlank = false;
    else if (!fence) afterBlank = true;
    position += line.length + 1;
  }
  return [...chunks, text.slice(start)];
}

/** The chunks of `text` after those of an earlier text, {head, chunks}, which it mostly begins with: no line before the
 * last cut is looked at again. Return the same for the next text. */
export function growChunks({ head, chunks }, text) {
  const ended = chunks.slice(0, -1);
  const all = text.startsWith(head) ? [...ended, ...chunksOf(text.slice(head.length))] : chunksOf(text);
  return { head: text.slice(0, text.length - all.at(-1).length), chunks: all };
}

function useChunks(text) {
  const grown = useRef({ head: "", chunks: [] });
  useMemo(() => (grown.current = growChunks(grown.current, text)), [text]);
  return grown.current.chunks;
}

/** One chunk. It is parsed where this task has time, else in a task of its own; until then it shows as it was before. */
function Block({ text }) {
  const parsed = useRef({ text: null, cleaned: null, misses: false, version: 0 });
  const [, redraw] = useReducer((count) => count + 1, 0);
  const { misses, version } = parsed.current;
  const isCurrent = parsed.current.text === text && !(misses && version !== loadedVersion());
  if (!isCurrent && hasTime()) {
    const [cleaned, missing] = lookingForMissing(() => clean(text));
    parsed.current = { text, cleaned, misses: missing, version: loadedVersion() };
  }
  const isLate = parsed.current.text !== text || (!isCurrent && parsed.current.version !== loadedVersion());
  useEffect(() => (isLate ? later(redraw) : undefined), [isLate, text]);
  useEffect(() => (parsed.current.misses ? onLoaded(redraw) : undefined), [parsed.current.misses]);
  if (parsed.current.cleaned === null) return html`<${Growing} text=${text} />`;
  return html`<div class="markdown" dangerouslySetInnerHTML=${{ __html: parsed.current.cleaned }} onClick=${pressed}></div>`;
}

/** A block that cannot be cut, and so long that laying it out would hold up the page: text, until its reader wants more. */
function LongBlock({ text }) {
  const [isWanted, setWanted] = useState(false);
  if (isWanted) return html`<${Block} text=${text} />`;
  return html`<${Growing} text=${text} /><button class="plain" onClick=${() => setWanted(true)}>show ${text.length} characters as Markdown</button>`;
}

/** A picture from outside is fetched when its reader asks for it, by opening it elsewhere; the button of a block copies it. */
async function pressed({ target }) {
  const source = target.dataset?.src;
  if (source) open(source, "_blank", "noopener,noreferrer");
  if (!target.classList?.contains("copy-code")) return;
  await navigator.clipboard.writeText(target.closest(".code-block").querySelector("code").textContent.replace(/\n$/, ""));
  target.textContent = "Copied";
  setTimeout(() => (target.textContent = "Copy"), 1200);
}

/** Markdown as it grows: finished chunks stay as they are. While it grows, a block that is too long to be parsed with
 * every frame shows as the text that it is. */
export function Markdown({ text, grows = false }) {
  const chunks = useChunks(text);
  const last = chunks.length - 1;
  return html`<div>
    ${chunks.map((chunk, index) => {
      if (grows && index === last && chunk.length > MOST_PARSED_AGAIN) return html`<${Growing} key=${index} text=${chunk} />`;
      return chunk.length > MOST_LAID_OUT ? html`<${LongBlock} key=${index} text=${chunk} />` : html`<${Block} key=${index} text=${chunk} />`;
    })}
  </div>`;
}

/** The text of an answer with its citations as numbered marks, and their sources below. */
export function Cited({ text, annotations, grows }) {
  const [near, setNear] = useState(null);
  const look = ({ target }) => {
    const mark = target.closest?.("a.cite");
    if (!mark) return setNear(null);
    const { left, bottom } = mark.getBoundingClientRect();
    return setNear({ number: Number(mark.textContent.replace(/\D/g, "")), left, top: bottom });
  };
  return html`<div class="cited" onMouseOver=${look} onMouseLeave=${() => setNear(null)} onFocusIn=${look} onFocusOut=${() => setNear(null)}>
    <${Markdown} text=${grows ? text : withMarks(text, annotations)} grows=${grows} /><${Sources} text=${text} annotations=${annotations} near=${near} /></div>`;
}
