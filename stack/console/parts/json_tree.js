// A JSON value as a tree that folds. It evaluates nothing: keys and values are text nodes.

import { pretty } from "../format.js";
import { html, useState } from "../vendor/preact.js";
import { Copy } from "./states.js";

const MOST_CHILDREN = 200;
const MOST_CHARS = 2000;

export function JsonTree({ value, open = 2 }) {
  return html`<div class="json mono"><${Copy} text=${() => pretty(value)} label="Copy the JSON" /><${Node} value=${value} depth=${0} open=${open} /></div>`;
}

function Node({ name, value, depth, open }) {
  const label = name === undefined ? "" : html`<span class="key">${name}</span>: `;
  if (value === null || typeof value !== "object") return html`<div class="leaf">${label}<${Leaf} value=${value} /></div>`;
  const entries = Object.entries(value);
  const brackets = Array.isArray(value) ? "[]" : "{}";
  if (!entries.length) return html`<div class="leaf">${label}${brackets}</div>`;
  return html`<${Fold} label=${label} brackets=${brackets} entries=${entries} depth=${depth} open=${open} />`;
}

function Fold({ label, brackets, entries, depth, open }) {
  const [shown, setShown] = useState(depth < open);
  const [most, setMost] = useState(MOST_CHILDREN);
  return html`<details open=${shown} onToggle=${(event) => setShown(event.target.open)}>
    <summary>${label}<span class="quiet">${brackets[0]}${shown ? "" : ` ${entries.length} ${brackets[1]}`}</span></summary>
    ${shown && entries.slice(0, most).map(([key, child]) => html`<${Node} key=${key} name=${key} value=${child} depth=${depth + 1} open=${open} />`)}
    ${shown && entries.length > most && html`<button class="plain" onClick=${() => setMost(most + 1000)}>${entries.length - most} more</button>`}
  </details>`;
}

function Leaf({ value }) {
  const [whole, setWhole] = useState(false);
  const text = JSON.stringify(value) ?? "undefined";
  const kind = value === null ? "null" : typeof value;
  if (text.length <= MOST_CHARS || whole) return html`<span class="value ${kind}">${text}</span>`;
  return html`<span class="value ${kind}">${text.slice(0, MOST_CHARS)}…</span>
    <button class="plain" onClick=${() => setWhole(true)}>show all ${text.length} characters</button>`;
}
