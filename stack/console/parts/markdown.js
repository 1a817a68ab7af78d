// Markdown of a model: parsed by marked, cleaned by DOMPurify as a Trusted Type, citations as numbered marks.
//
// Model output is data. Links show their host and open elsewhere; pictures from outside load only after a click.

import { marked } from "../vendor/marked.js";
import { html, useMemo } from "../vendor/preact.js";

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

const CHUNK_CHARS = 2000;
const MOST_PARSED_AGAIN = 6000;

/** Cut a text into chunks of whole blocks, so that a stream parses only its last one again: cuts stay where they are
 * while the text grows. A fence, a list and a quotation are kept together. */
export function chunksOf(text) {
  const chunks = [];
  let fence = false;
  let start = 0;
  let position = 0;
  let afterBlank = false;
  for (const line of text.split("\n")) {
    if (/^\s*(?:```|~~~)/.test(line)) fence = !fence;
    const begins = afterBlank && (!fence || /^(?:```|~~~)/.test(line)) && /^(?![\s>]|[-*+] |\d+[.)] )/.test(line);
    if (begins && line && position - start > CHUNK_CHARS) {
      chunks.push(text.slice(start, position));
      start = position;
    }
    if (line) afterBlank = false;
    else if (!fence) afterBlank = true;
    position += line.length + 1;
  }
  return [...chunks, text.slice(start)];
}

function Block({ text }) {
  const cleaned = useMemo(() => clean(text), [text]);
  return html`<div class="markdown" dangerouslySetInnerHTML=${{ __html: cleaned }} onClick=${showImage}></div>`;
}

/** A picture from outside is fetched when its reader asks for it, by opening it elsewhere. */
function showImage(event) {
  const source = event.target.dataset?.src;
  if (source) open(source, "_blank", "noopener,noreferrer");
}

/** Markdown as it grows: finished chunks stay as they are. While it grows, a block that is too long to be parsed with
 * every frame shows as the text that it is. */
export function Markdown({ text, grows = false }) {
  const chunks = useMemo(() => chunksOf(text), [text]);
  const last = chunks.length - 1;
  return html`<div>
    ${chunks.map((chunk, index) =>
      grows && index === last && chunk.length > MOST_PARSED_AGAIN
        ? html`<p class="wrap" key=${index}>${chunk}</p>`
        : html`<${Block} key=${index} text=${chunk} />`,
    )}
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
