// Metadata as rows of a key and a value.

import { Icon } from "../parts/icons.js";
import { html } from "../vendor/preact.js";

export const rowsOf = (metadata) => Object.entries(metadata || {});
/** The pairs of rows; a row without a key is none. */
export const pairsOf = (rows) => Object.fromEntries(rows.filter(([key]) => key.trim()).map(([key, value]) => [key.trim(), value]));

export function MetadataFields({ rows, onChange }) {
  const set = (index, column) => (event) => onChange(rows.map((row, at) => (at === index ? row.map((text, other) => (other === column ? event.target.value : text)) : row)));
  return html`<fieldset class="metadata"><legend>Metadata</legend>
    ${rows.map(
      ([key, value], index) => html`<div class="row" key=${index}>
        <input class="mono" maxlength="64" aria-label="Key ${index + 1}" placeholder="key" value=${key} onInput=${set(index, 0)} />
        <input class="grow" maxlength="512" aria-label="Value ${index + 1}" placeholder="value" value=${value} onInput=${set(index, 1)} />
        <button type="button" class="plain" aria-label="Remove pair ${index + 1}" onClick=${() => onChange(rows.filter((_, at) => at !== index))}><${Icon} name="close" /></button>
      </div>`,
    )}
    <button type="button" class="plain" disabled=${rows.length >= 16} onClick=${() => onChange([...rows, ["", ""]])}><${Icon} name="plus" /> Add a pair</button>
  </fieldset>`;
}
