// A choice of several: boxes for what is known, a field for what is not. None chosen means any.

import { html, useState } from "../vendor/preact.js";

/** `known` are [value, note] each; `onChange` gets the chosen values. `other` labels the field for further ones. */
export function ChoiceList({ legend, none, known, chosen, onChange, other }) {
  const [text, setText] = useState("");
  const values = known.map(([value]) => value);
  const extra = (from) => from.split(/[\s,]+/).filter((value) => value && !values.includes(value));
  const toggle = (value) => (event) => onChange(event.target.checked ? [...chosen, value] : chosen.filter((each) => each !== value));
  const typed = (event) => {
    setText(event.target.value);
    onChange([...chosen.filter((value) => values.includes(value)), ...extra(event.target.value)]);
  };
  return html`<fieldset class="choice"><legend>${legend}</legend>
    <div class=${known.some(([, note]) => note) ? "" : "checks"}>${known.map(
      ([value, note]) => html`<label class="check" key=${value}><input type="checkbox" checked=${chosen.includes(value)} onChange=${toggle(value)} />
        <span>${value}${note && html` <span class="quiet small">${note}</span>`}</span></label>`,
    )}</div>
    ${other && html`<label class="other">${other}<input class="mono" value=${text} onInput=${typed} /></label>`}
    <p class="quiet small">${chosen.length ? `Only: ${chosen.join(", ")}` : none}</p>
  </fieldset>`;
}
