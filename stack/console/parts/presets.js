// Presets of instructions: kept in this browser under a name.

import { readPresets, savePreset } from "../settings.js";
import { html, useState } from "../vendor/preact.js";

export function Presets({ text, onChoose }) {
  const [presets, setPresets] = useState(readPresets);
  const [name, setName] = useState("");
  const current = Object.keys(presets).find((each) => presets[each] === text) || "";
  const change = (key, value) => {
    savePreset(key, value);
    setPresets(readPresets());
  };
  const keep = (event) => {
    event.preventDefault();
    if (name.trim()) change(name.trim().slice(0, 60), text);
    setName("");
  };
  return html`<form class="row presets" onSubmit=${keep}>
    ${Object.keys(presets).length > 0 &&
    html`<select aria-label="Preset" value=${current} onChange=${(event) => onChoose(presets[event.target.value] || "")}>
      <option value="">no preset</option>${Object.keys(presets).sort().map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
    </select>`}
    ${current
      ? html`<button type="button" class="plain danger" onClick=${() => change(current, "")}>Forget it</button>`
      : text.trim() && html`<input class="grow" placeholder="Name of a preset" aria-label="Name of a preset" value=${name} onInput=${(event) => setName(event.target.value)} /><button disabled=${!name.trim()}>Keep</button>`}
  </form>`;
}
