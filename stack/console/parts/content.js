// One part of a message: text, refusal, picture, file.

import { apiPath } from "../api.js";
import { bytes } from "../format.js";
import { html } from "../vendor/preact.js";
import { Icon } from "./icons.js";
import { JsonTree } from "./json_tree.js";
import { Cited } from "./markdown.js";
import { PdfCard, isPdf } from "./pdf_pages.js";
import { StoredPicture } from "./sources.js";

const isPicture = (url) => (url || "").startsWith("data:image/");

export function Part({ part, grows }) {
  if (part.refusal !== undefined) return html`<p class="refusal">${part.refusal}</p>`;
  if (part.text !== undefined && part.type !== "input_text") return html`<${Cited} text=${part.text} annotations=${part.annotations} grows=${grows} />`;
  if (part.text !== undefined) return html`<p class="input">${part.text}</p>`;
  if (part.type === "input_image" || part.type === "computer_screenshot") return html`<${Picture} part=${part} />`;
  if (part.type === "input_file") return html`<${File} part=${part} />`;
  return html`<${JsonTree} value=${part} open=${1} />`;
}

/** A picture that is in the item, or stored on this server; one from elsewhere is named and not fetched. */
function Picture({ part }) {
  if (isPicture(part.image_url)) return html`<img class="attached" src=${part.image_url} alt="attached picture" />`;
  if (part.file_id) return html`<${StoredPicture} path=${apiPath`files/${part.file_id}/content`} alt="attached picture" />`;
  return html`<p class="quiet">picture: ${part.image_url}</p>`;
}

const sizeOf = (data) => Math.floor(((data.length - data.indexOf(",") - 1) * 3) / 4);

function File({ part }) {
  const name = part.filename || part.file_id || part.file_url;
  return html`<div class="file-card"><${Card} part=${part} name=${name} /><span class="clip">${name}</span>${part.file_data && html`<span class="quiet small tabular">${bytes(sizeOf(part.file_data))}</span>`}</div>`;
}

/** The first page of a PDF, the first lines of a text, or the kind of any other file. */
function Card({ part, name }) {
  const plain = part.file_data ? html`<${PageCard} name=${name} data=${part.file_data} />` : html`<${Icon} name="files" />`;
  if (!isPdf(name) || !(part.file_data || part.file_id)) return plain;
  return html`<${PdfCard} source=${{ fileId: part.file_id, data: part.file_data }} name=${name} fallback=${html`<b>PDF</b>`} />`;
}

const MOST_PREVIEW_CHARS = 400;
/** Formats whose bytes are no text. */
const BINARY = /\.(?:pdf|docx|xlsx|pptx|zip|gz|png|jpe?g|gif|webp|mp3|wav)$/i;

/** The first lines of a text as a small page; the kind of any other file. */
function PageCard({ name = "", data }) {
  const kind = (/\.(\w{1,5})$/.exec(name)?.[1] || "file").toUpperCase();
  const text = BINARY.test(name) ? "" : firstText(data);
  return html`<span class="page-card" aria-hidden="true">${text ? html`<span>${text}</span>` : html`<b>${kind}</b>`}</span>`;
}

function firstText(data) {
  try {
    const start = data.slice(data.indexOf(",") + 1).slice(0, MOST_PREVIEW_CHARS * 4); // a whole number of groups
    const text = new TextDecoder().decode(Uint8Array.from(atob(start), (char) => char.charCodeAt(0)));
    return text.includes("\u0000") ? "" : text.slice(0, MOST_PREVIEW_CHARS);
  } catch {
    return "";
  }
}

/** A picture or a file before it is sent. */
export const Thumbnail = ({ part }) =>
  isPicture(part.image_url)
    ? html`<img class="thumb" src=${part.image_url} alt="picture" />`
    : html`<${Card} part=${part} name=${part.filename || part.file_id} /><span class="clip">${part.filename || part.file_id || "picture"}</span>${part.file_data && html`<span class="quiet tabular">${bytes(sizeOf(part.file_data))}</span>`}`;
