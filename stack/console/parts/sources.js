// Citations: numbered marks in the text, and the sources below it with what they are cited for and the files that tools made.

import { apiPath, fetchBlob } from "../api.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { MARK } from "./clean.js";
import { Download } from "./states.js";

const PICTURE = /\.(?:png|jpe?g|gif|webp)$/i;
const MOST_PASSAGE_CHARS = 240;

const keyOf = (annotation) => annotation?.url || annotation?.file_id;

/** Number the sources of annotations: [{number, url, title, passage}], one for each source. */
export function sourcesOf(annotations = [], text = "") {
  const sources = new Map();
  for (const annotation of annotations || []) {
    const key = keyOf(annotation);
    if (!key || sources.has(key)) continue;
    sources.set(key, {
      number: sources.size + 1,
      url: annotation.url,
      fileId: annotation.file_id,
      containerId: annotation.container_id,
      title: annotation.title || annotation.filename || annotation.url || annotation.file_id,
      passage: passageBefore(text, annotation.start_index ?? annotation.index),
    });
  }
  return [...sources.values()];
}

/** The sentence that ends where a citation begins. */
function passageBefore(text, at) {
  if (at === undefined) return "";
  const before = text.slice(Math.max(0, at - MOST_PASSAGE_CHARS), at).trimEnd();
  const start = Math.max(before.lastIndexOf("\n"), before.slice(0, -1).search(/[.!?]\s+[^.!?]*[.!?]?$/) + 1);
  return before.slice(start).trim().replace(/[*_`#>]+/g, "");
}

const escape = (title) => title.replace(/[\\"\n]+/g, " ");

/** The text with its citations as numbered marks: a mark takes the place of the link that the server wrote for it. */
export function withMarks(text, annotations) {
  const numbers = new Map(sourcesOf(annotations).map((source) => [source.url || source.fileId, source]));
  const cited = (annotations || []).filter((each) => each?.type === "url_citation" && /^https?:/i.test(each.url) && text.slice(each.start_index, each.end_index).includes("]("));
  return [...cited]
    .sort((one, other) => other.start_index - one.start_index)
    .reduce((marked, { url, start_index: start, end_index: end }) => {
      const { number, title } = numbers.get(url);
      return `${marked.slice(0, start).trimEnd()}[${MARK}${number}](${url.replace(/[()<>\s]/g, (char) => encodeURIComponent(char).replace("(", "%28").replace(")", "%29"))} "${escape(title)}")${marked.slice(end)}`;
    }, text);
}

/** `near` is {number, left, top} of a mark in the text: its source shows there. */
export function Sources({ text = "", annotations, near }) {
  const sources = sourcesOf(annotations, text);
  if (!sources.length) return null;
  const shown = near && sources[near.number - 1];
  return html`${shown && html`<${Preview} source=${shown} near=${near} />`}<ol class="sources" aria-label="Sources">
    ${sources.map(
      (source) => html`<li key=${source.number} value=${source.number}>
        ${/^https?:/i.test(source.url || "")
          ? html`<a href=${source.url} target="_blank" rel="noopener noreferrer">${source.title}</a> <span class="quiet">${hostOf(source.url)}</span>`
          : html`<span>${source.title}</span>`}
        ${source.containerId && source.fileId && html`<${MadeFile} source=${source} />`}
        ${source.passage && !source.containerId && html`<div class="quiet passage">“${source.passage}”</div>`}
      </li>`,
    )}
  </ol>`;
}

const PREVIEW_PX = 320;

/** The source of a mark, next to it: a second look at what the list below says. */
const Preview = ({ source, near }) =>
  html`<div class="preview" aria-hidden="true" style=${{ left: `${Math.max(8, Math.min(near.left, innerWidth - PREVIEW_PX - 8))}px`, top: `${near.top + 4}px` }}>
    <b class="clip">${source.title}</b>${source.url && html`<span class="quiet clip">${hostOf(source.url)}</span>`}${source.passage && html`<span class="passage">“${source.passage}”</span>`}
  </div>`;

/** A file that a tool made: to download, and shown where it is a picture. */
function MadeFile({ source }) {
  const path = apiPath`containers/${source.containerId}/files/${source.fileId}/content`;
  return html` <${Download} path=${path} name=${source.title} />${PICTURE.test(source.title) && html`<${StoredPicture} path=${path} alt=${source.title} />`}`;
}

/** A picture of the server: only a request can carry the key. */
export function StoredPicture({ path, alt }) {
  const [url, setUrl] = useState("");
  const [error, setError] = useState(null);
  useEffect(() => {
    let made = "";
    let isWanted = true;
    fetchBlob(path).then(
      (blob) => {
        if (!isWanted || !/^image\/(?!svg)/.test(blob.type)) return;
        made = URL.createObjectURL(blob);
        setUrl(made);
      },
      (failure) => isWanted && setError(failure),
    );
    return () => {
      isWanted = false;
      URL.revokeObjectURL(made);
    };
  }, [path]);
  if (error) return html`<span class="bad small">${error.message}</span>`;
  return url && html`<img class="attached" src=${url} alt=${alt} />`;
}

function hostOf(url) {
  try {
    return new URL(url).host;
  } catch {
    return "";
  }
}
