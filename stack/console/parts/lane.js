// The frame of an item (its kind, time and status) and the text of a tool.

import { ms } from "../format.js";
import { html, useState } from "../vendor/preact.js";
import { Icon } from "./icons.js";
import { Status } from "./states.js";

const MOST_CHARS = 4000;

/** With `picks`, the label is a button: its click reaches the item, which is then selected. */
export function Lane({ label, elapsed, running, children, status, picks, icon = "tool" }) {
  return html`<header><${Icon} name=${icon} />${picks ? html`<button type="button" class="plain pick" title="Show its events">${label}</button>` : html`<b>${label}</b>`}
      ${elapsed !== undefined && html`<span class="quiet tabular">${ms(elapsed)}</span>`}
      ${running && html`<${Status} status="running" />`} ${!running && status && status !== "completed" && html`<${Status} status=${status} />`}
    </header>
    <div class="body">${children}</div>`;
}

/** Text of a tool, whole only when asked for. */
export function Output({ text, label = "result" }) {
  const [whole, setWhole] = useState(false);
  const shown = whole ? text : text.slice(0, MOST_CHARS);
  return html`<pre class="wrap output" aria-label=${label} tabindex="0">${shown}</pre>
    ${text.length > shown.length && html`<button class="plain" onClick=${() => setWhole(true)}>show all ${text.length} characters</button>`}`;
}
