// Markdown of a model: parsed by marked, cleaned by DOMPurify as a Trusted Type, citations as numbered marks.
//
// Model output is data. Links show their host and open elsewhere; pictures from outside load only after a click.

import { marked } from "../vendor/marked.js";
import { hasTime, later } from "../slices.js";
import { html, useEffect, useMemo, useReducer, useRef, useState } from "../vendor/preact.js";
import { Growing } from "./growing.js";

const ALLOWED_URI = /^(?:https?:|mailto:|blob:|#)/i;
const purify = globalThis.DOMPurify;

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A" && node.hasAttribute("href")) {
    node.setAttribute("rel", "noopener noreferrer");
    node.setAttribute("target", "_blank");
    try {
      node.setAttribute("title", new URL(node.getAttribute("href")).host);
    } catch {
      node.removeAttribute("href");
    }
  }
  if (node.tagName === "IMG") {
    const source = node.getAttribute("src") || "";
    const link = node.ownerDocument.createElement("span");
    link.className = "blocked-image";
    link.dataset.src = /^https?:/i.test(source) ? source : "";
    link.textContent = `picture: ${node.getAttribute("alt") || source || "unnamed"}`;
    node.replaceWith(link);
  }
});

// Raw HTML in Markdown shows as the text that it is.
const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
marked.use({ renderer: { html: ({ text }) => escape(text) } });

const CLEAN = {
  ALLOWED_TAGS: (
    "p br hr b strong i em s del u code pre kbd blockquote ul ol li h1 h2 h3 h4 h5 h6 a img table thead tbody tr th td sup sub span"
  ).split(" "),
  ALLOWED_ATTR: ["href", "title", "src", "alt", "align", "start", "class"],
  ALLOWED_URI_REGEXP: ALLOWED_URI,
  ALLOW_DATA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

export const clean = (markdown) => purify.sanitize(marked.parse(markdown, { async: false, gfm: true, breaks: true }), CLEAN);

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
  const parsed = useRef({ text: null, cleaned: null });
  const [, redraw] = useReducer((count) => count + 1, 0);
  if (parsed.current.text !== text && hasTime()) parsed.current = { text, cleaned: clean(text) };
  const isLate = parsed.current.text !== text;
  useEffect(() => (isLate ? later(redraw) : undefined), [isLate, text]);
  if (parsed.current.cleaned === null) return html`<${Growing} text=${text} />`;
  return html`<div class="markdown" dangerouslySetInnerHTML=${{ __html: parsed.current.cleaned }} onClick=${showImage}></div>`;
}

/** A block that cannot be cut, and so long that laying it out would hold up the page: text, until its reader wants more. */
function LongBlock({ text }) {
  const [isWanted, setWanted] = useState(false);
  if (isWanted) return html`<${Block} text=${text} />`;
  return html`<${Growing} text=${text} /><button class="plain" onClick=${() => setWanted(true)}>show ${text.length} characters as Markdown</button>`;
}

/** A picture from outside is fetched when its reader asks for it, by opening it elsewhere. */
function showImage(event) {
  const source = event.target.dataset?.src;
  if (source) open(source, "_blank", "noopener,noreferrer");
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

/** Number the sources of annotations: [{number, url, title, quote}], one for each source. */
export function sourcesOf(annotations = []) {
  const sources = new Map();
  for (const annotation of annotations) {
    const key = annotation?.url || annotation?.file_id;
    if (!key || sources.has(key)) continue;
    sources.set(key, {
      number: sources.size + 1,
      url: annotation.url,
      fileId: annotation.file_id,
      containerId: annotation.container_id,
      title: annotation.title || annotation.filename || annotation.url || annotation.file_id,
    });
  }
  return [...sources.values()];
}

export function Sources({ annotations }) {
  const sources = sourcesOf(annotations);
  if (!sources.length) return null;
  return html`<ol class="sources" aria-label="Sources">
    ${sources.map(
      (source) => html`<li key=${source.number} value=${source.number}>
        ${/^https?:/i.test(source.url || "")
          ? html`<a href=${source.url} target="_blank" rel="noopener noreferrer">${source.title}</a> <span class="quiet">${hostOf(source.url)}</span>`
          : html`<span>${source.title}</span>`}
      </li>`,
    )}
  </ol>`;
}

function hostOf(url) {
  try {
    return new URL(url).host;
  } catch {
    return "";
  }
}
