// The settings of the Playground as a form. Empty fields leave the choice to the server.

import { HOSTED_TOOLS } from "../settings.js";
import { html } from "../vendor/preact.js";

const FUNCTION = '[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]';
const SERVER = '[{"server_label": "docs", "server_url": "https://example.com/mcp", "require_approval": "always"}]';
const SCHEMA = '{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"], "additionalProperties": false}';

export function Settings({ settings, onChange }) {
  const set = (name) => (event) => onChange({ ...settings, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const toggle = (tool) => (event) =>
    onChange({ ...settings, tools: event.target.checked ? [...settings.tools, tool] : settings.tools.filter((other) => other !== tool) });
  const area = (name, label, placeholder, rows = 2) =>
    html`<label class="wide">${label}<textarea rows=${rows} class=${name === "instructions" ? "" : "mono"} placeholder=${placeholder} value=${settings[name]} onInput=${set(name)}></textarea></label>`;
  const numeric = (name, label, step, max) =>
    html`<label>${label}<input type="number" min="0" max=${max} step=${step} placeholder="default" value=${settings[name]} onInput=${set(name)} /></label>`;
  return html`<div class="settings">
    ${area("instructions", "Instructions", "You are …")}
    <label>Effort
      <select value=${settings.effort} onChange=${set("effort")}>
        <option value="">default</option>
        ${["none", "minimal", "low", "medium", "high", "xhigh"].map((effort) => html`<option key=${effort}>${effort}</option>`)}
      </select>
    </label>
    ${numeric("temperature", "Temperature", 0.1, 2)} ${numeric("topP", "Top p", 0.05, 1)} ${numeric("maxOutputTokens", "Most output tokens", 1)}
    <fieldset class="wide"><legend>Tools of the server</legend>
      ${HOSTED_TOOLS.map(
        ([type, label]) => html`<label class="check" key=${type}><input type="checkbox" checked=${settings.tools.includes(type)} onChange=${toggle(type)} /> ${label}</label>`,
      )}
      ${settings.tools.includes("file_search") &&
      html`<label>Vector stores<input class="mono" placeholder="vs_…" value=${settings.vectorStoreIds} onInput=${set("vectorStoreIds")} /></label>`}
    </fieldset>
    ${area("functions", "Functions that you answer", FUNCTION)} ${area("mcpServers", "MCP servers", SERVER)} ${area("schema", "Answer as JSON of this schema", SCHEMA)}
    <fieldset class="wide"><legend>Run</legend>
      <label class="check"><input type="checkbox" checked=${settings.background} onChange=${set("background")} /> in the background</label>
      <label class="check"><input type="checkbox" checked=${settings.store} onChange=${set("store")} /> stored</label>
    </fieldset>
  </div>`;
}
