// Empty, loading and failed states, and the small parts that all views share.

import { download } from "../api.js";
import { shortId, time, utc } from "../format.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Icon } from "./icons.js";

const REMEDIES = {
  401: "Sign in, or enter a valid key: the button Key in the rail.",
  404: "It may have been deleted, or belong to another key.",
  413: "Send less, or ask the operator for a higher limit.",
  429: "Wait a moment and try again.",
  503: "The server is busy, or its store is away. Try again.",
};

/** The API's message with its code, param and request id, and one remedy. */
export function Failure({ error, onRetry }) {
  const facts = [error.status && `HTTP ${error.status}`, error.code, error.param && `param ${error.param}`, error.requestId]
    .filter(Boolean)
    .join(" · ");
  return html`<div class="failure" role="alert">
    <b>${error.message || String(error)}</b>
    ${facts && html`<div class="mono small">${facts}</div>`}
    ${REMEDIES[error.status] && html`<div class="quiet">${REMEDIES[error.status]}</div>`}
    ${onRetry && html`<button onClick=${onRetry}>Try again</button>`}
  </div>`;
}

/** Says that a stream is lost and asked for again; the rest of the page stays as it was. */
export const Reconnecting = ({ run }) =>
  run?.waits &&
  html`<div class="notice" role="status">
    <b>The connection broke off.</b> The response goes on without it. Asking for what follows event ${Math.max(0, run.waits.after)} again, try ${run.waits.tries}.
  </div>`;

/** One sentence, and one thing to do. */
export const Empty = ({ title, children }) => html`<div class="empty"><p>${title}</p>${children}</div>`;

export const Skeleton = ({ rows = 6 }) =>
  html`<div class="skeleton" aria-label="Loading">${Array.from({ length: rows }, (_, row) => html`<i key=${row}></i>`)}</div>`;

/** A status as word, shape and colour. */
export const Status = ({ status, word = status }) =>
  html`<span class="status ${status}"><i aria-hidden="true"></i><span>${(word || "").replace("_", " ")}</span></span>`;

export const Time = ({ at }) => html`<time datetime=${utc(at)} title=${utc(at)}>${time(at)}</time>`;

/** An id, shortened in the middle, that copies whole. */
export function Id({ id, href }) {
  return html`<span class="id mono" title=${id}>
    ${href ? html`<a href=${href}>${shortId(id)}</a>` : shortId(id)}<${Copy} text=${id} label="Copy the id" />
  </span>`;
}

export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async (event) => {
    event.preventDefault();
    event.stopPropagation();
    await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1200);
  };
  return html`<button class="plain copy" type="button" title=${label} aria-label=${label} onClick=${copy}>
    ${done ? "copied" : html`<${Icon} name="copy" />`}
  </button>`;
}

/** A button that saves a file; its error shows in its place. */
export function Download({ path, name }) {
  const [error, setError] = useState(null);
  if (error) return html`<span class="bad small" role="alert">${error.message}</span>`;
  return html`<button type="button" class="plain" aria-label="Download ${name}" onClick=${() => download(path, name).catch(setError)}>Download</button>`;
}

/** A button that cannot be undone: the first press asks, naming the object, the second does it. */
export function ConfirmButton({ verb, what, onConfirm }) {
  const [asks, setAsks] = useState(false);
  const [error, setError] = useState(null);
  const keep = useRef(null);
  useEffect(() => void keep.current?.focus(), [asks]);
  const confirm = async () => {
    try {
      await onConfirm();
    } catch (failure) {
      setError(failure);
    }
  };
  if (error) return html`<span class="bad small" role="alert">${error.message}</span>`;
  if (!asks) return html`<button type="button" class="plain danger" onClick=${() => setAsks(true)}>${verb}</button>`;
  return html`<span class="row ask" role="group" aria-label="${verb} ${what}?">
    <span>${verb} ${what}?</span>
    <button type="button" class="danger" onClick=${confirm}>${verb}</button>
    <button type="button" ref=${keep} onClick=${() => setAsks(false)}>Keep</button>
  </span>`;
}

export const DeleteButton = ({ what, onDelete }) => html`<${ConfirmButton} verb="Delete" what=${what} onConfirm=${onDelete} />`;

/** Tabs by name; `children` is the content of the current one. `labels` are shown instead of names; arrow keys move. */
export function Tabs({ names, labels = {}, current, onChange, children, label }) {
  const list = useRef(null);
  const moved = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const index = (names.indexOf(current) + by + names.length) % names.length;
    onChange(names[index]);
    list.current.children[index].focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${list} onKeyDown=${moved}>
      ${names.map(
        (name) => html`<button
          key=${name}
          role="tab"
          type="button"
          aria-selected=${name === current}
          tabindex=${name === current ? 0 : -1}
          class=${name === current ? "on" : ""}
          onClick=${() => onChange(name)}
          >${labels[name] || name}</button
        >`,
      )}
    </div>
    <div role="tabpanel" class="panel" tabindex="0" aria-label=${current}>${children}</div>`;
}

let lastId = 0;

/** An id of the page for `aria-describedby`. */
export function useUniqueId() {
  const id = useRef("");
  id.current ||= `note-${(lastId += 1)}`;
  return id.current;
}
