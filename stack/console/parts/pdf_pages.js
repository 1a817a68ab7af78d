// Pages of a PDF as pictures, which the server draws: the first one as a thumbnail, all of them when it is opened.

import { apiPath, get, post } from "../api.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Failure, Skeleton } from "./states.js";

const AT_ONCE = 4;
const THUMB_PX = 120;
const PAGE_PX = 1000;
const MOST_KEPT = 50;
const kept = new Map();
let turn = Promise.resolve();

export const isPdf = (name) => /\.pdf$/i.test(name || "");

/** Return {data, page_count} of a file of the server (`fileId`) or of one that is in a message (`data`). */
const draw = ({ fileId, data }, range) =>
  fileId ? get(apiPath`files/${fileId}/page_images`, range) : post("stack/page_images", { file_data: data, ...range });

/** The first page, drawn once; a list of files asks for one after the other. */
function firstPage(source) {
  const key = source.fileId || source.data;
  if (!kept.has(key)) {
    if (kept.size >= MOST_KEPT) kept.delete(kept.keys().next().value);
    turn = turn.then(() => draw(source, { width: THUMB_PX }));
    kept.set(key, turn);
    turn = turn.catch(() => void kept.delete(key)); // the next view of it asks again
  }
  return kept.get(key);
}

/** A thumbnail that opens the pages; `fallback` takes its place until it is drawn, and where it cannot be. */
export function PdfCard({ source, name, fallback }) {
  const [first, setFirst] = useState(null);
  const [failure, setFailure] = useState(null);
  const [isOpen, setOpen] = useState(false);
  const card = useRef(null);
  useEffect(() => {
    let isWanted = true;
    const watcher = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      firstPage(source).then((drawn) => isWanted && setFirst(drawn), (error) => isWanted && setFailure(error));
    });
    watcher.observe(card.current);
    return () => {
      isWanted = false;
      watcher.disconnect();
    };
  }, [source.fileId || source.data]);
  const page = first?.data[0];
  const label = page ? `Show the pages of ${name}` : failure ? `Pages of ${name}: ${failure.message}` : `Pages of ${name}`;
  return html`<button type="button" class="page-card drawn" ref=${card} disabled=${!page} title=${label} aria-label=${label} onClick=${() => setOpen(true)}>
      ${page ? html`<img src=${page.image_url} alt="" />` : fallback}</button
    >${isOpen && html`<${Pages} source=${source} name=${name} count=${first.page_count} onClose=${() => (setOpen(false), card.current.focus())} />`}`;
}

/** The name of a stored file, with the first page of a PDF. */
export const FileName = ({ id, name }) =>
  html`<span class="row">${isPdf(name) && html`<${PdfCard} source=${{ fileId: id }} name=${name} fallback=${html`<b>PDF</b>`} />`}<span class="clip" title=${name}>${name}</span></span>`;

function Pages({ source, name, count, onClose }) {
  const [pages, setPages] = useState([]);
  const [failure, setFailure] = useState(null);
  const box = useRef(null);
  const more = (first) => {
    setFailure(null);
    draw(source, { first, count: AT_ONCE, width: PAGE_PX }).then((drawn) => setPages((old) => [...old.slice(0, first - 1), ...drawn.data]), setFailure);
  };
  useEffect(() => {
    box.current.showModal();
    more(1);
  }, []);
  const isWhole = pages.length >= count;
  return html`<dialog class="pages" aria-label="Pages of ${name}" ref=${box} onClose=${onClose} onKeyDown=${(event) => event.stopPropagation()} onClick=${(event) => event.target === box.current && box.current.close()}>
    <header class="row"><b class="clip">${name}</b><span class="quiet small tabular">${count} ${count === 1 ? "page" : "pages"}</span><span class="grow"></span><button type="button" onClick=${() => box.current.close()}>Close</button></header>
    <div class="sheets" tabindex="0" role="group" aria-label="Pages">
      ${pages.map((page) => html`<img key=${page.page} src=${page.image_url} width=${page.width} height=${page.height} alt="Page ${page.page} of ${name}" />`)}
      ${failure ? html`<${Failure} error=${failure} onRetry=${() => more(pages.length + 1)} />` : !pages.length && html`<${Skeleton} />`}
      ${pages.length > 0 && !isWhole && !failure && html`<button type="button" class="more" onClick=${() => more(pages.length + 1)}>More pages: ${pages.length} of ${count} are shown</button>`}
    </div>
  </dialog>`;
}
