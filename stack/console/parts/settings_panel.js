// The settings of the Playground as a form. Empty fields leave the choice to the server.

import { problemOf } from "../schema/metaschema.js";
import { BOXES, savePreference } from "../settings.js";
import { html } from "../vendor/preact.js";
import { enterSends } from "./composer.js";
import { CloseSide } from "./inspector.js";
import { Presets } from "./presets.js";
import { ToolSwitches } from "./tool_switches.js";
import { useUniqueId } from "./states.js";

const FUNCTION = '[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]';
const SERVER = '[{"server_label": "docs", "server_url": "https://example.com/mcp", "require_approval": "always"}]';
const SCHEMA = '{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"], "additionalProperties": false}';

export function Settings({ settings, tools, onChange, onClose }) {
  const set = (name) => (event) => onChange({ ...settings, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const area = (name, label, placeholder, rows = 2) =>
    html`<label class="wide">${label}<textarea rows=${rows} placeholder=${placeholder} value=${settings[name]} onInput=${set(name)}></textarea></label>`;
  const box = (name, placeholder) => html`<${JsonBox} key=${name} name=${name} placeholder=${placeholder} value=${settings[name]} onInput=${set(name)} />`;
  const numeric = (name, label, step, max) =>
    html`<label>${label}<input type="number" min="0" max=${max} step=${step} placeholder="default" value=${settings[name]} onInput=${set(name)} /></label>`;
  return html`<aside class="inspector settings" aria-label="Settings">
    <${CloseSide} onClose=${onClose} /><h2>Settings</h2>
    <div class="fields">
    <div class="wide">${area("instructions", "Instructions", "You are …")}<${Presets} text=${settings.instructions} onChoose=${(instructions) => onChange({ ...settings, instructions })} /></div>
    <label>Effort
      <select value=${settings.effort} onChange=${set("effort")}>
        <option value="">default</option>
        ${["none", "minimal", "low", "medium", "high", "xhigh"].map((effort) => html`<option key=${effort}>${effort}</option>`)}
      </select>
    </label>
    ${numeric("temperature", "Temperature", 0.1, 2)} ${numeric("topP", "Top p", 0.05, 1)} ${numeric("maxOutputTokens", "Most output tokens", 1)}
    <${ToolSwitches} settings=${settings} tools=${tools} onChange=${onChange} />
    ${box("functions", FUNCTION)} ${box("mcpServers", SERVER)} ${box("schema", SCHEMA)}
    <fieldset class="wide"><legend>Run</legend>
      <label class="check"><input type="checkbox" checked=${settings.store} onChange=${set("store")} /> stored</label>
      <label class="check" title="The answer goes on when this page is closed"><input type="checkbox" disabled=${!settings.store} checked=${settings.background && settings.store} onChange=${set("background")} /> in the background</label>
      <label class="check"><input type="checkbox" checked=${enterSends()} onChange=${(event) => (savePreference("enter", event.target.checked), onChange({ ...settings }))} /> Enter sends</label>
    </fieldset>
    </div>
  </aside>`;
}

/** A box of JSON that says what is wrong with its text as it is typed. */
function JsonBox({ name, placeholder, value, onInput }) {
  const id = useUniqueId();
  const problem = problemOf(name, value);
  return html`<label class="wide">${BOXES[name]}
    <textarea rows="3" class="mono" spellcheck="false" placeholder=${placeholder} value=${value} onInput=${onInput} aria-invalid=${Boolean(problem)} aria-describedby=${problem ? id : undefined}></textarea>
    ${problem && html`<span id=${id} class="bad small">${problem}</span>`}</label>`;
}
