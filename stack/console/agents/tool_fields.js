// The tools of an agent as switches, its functions as JSON, and what else it has.

import { Switch } from "../parts/tool_switches.js";
import { pretty } from "../format.js";
import { reasonOf } from "../tools.js";
import { html } from "../vendor/preact.js";
import { SWITCHED, connectorKey, hidesSecret, toolName } from "./tools.js";

const FUNCTION = '[{"name": "get_weather", "description": "The weather of a city.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]';

/** `value` is what cutTools returns; `server` what useTools says of the server. */
export function ToolFields({ value, server, problem, onChange }) {
  const { switched, asks } = value;
  const toggle = (field, key) => (event) =>
    onChange({ ...value, [field]: event.target.checked ? [...value[field], key] : value[field].filter((other) => other !== key) });
  const labels = [...new Set([...server.servers, ...switched.filter((key) => key.includes(":")).map((key) => key.slice(key.indexOf(":") + 1))])];
  return html`<fieldset class="switches"><legend>Tools</legend>
      ${SWITCHED.map(
        ([type, label, effect]) => html`<${Switch} key=${type} label=${label} note=${effect} reason=${reasonOf(server, type)} isOn=${switched.includes(type)} onChange=${toggle("switched", type)} />`,
      )}
      ${labels.map((label) => {
        const key = connectorKey(label);
        return html`<div key=${key} class="connector"><${Switch} label=${label} note="MCP server of this server's config" isOn=${switched.includes(key)} onChange=${toggle("switched", key)} />
          ${switched.includes(key) && html`<label class="check small"><input type="checkbox" checked=${asks.includes(key)} onChange=${toggle("asks", key)} /> each call of ${label} waits for an approval</label>`}</div>`;
      })}
      ${value.others.map((tool, index) => html`<${Other} key=${toolName(tool) + index} tool=${tool} onChange=${(next) => onChange({ ...value, others: value.others.flatMap((each, at) => (at === index ? next : each)) })} />`)}
    </fieldset>
    <label>Functions that your program runs
      <textarea rows="4" class="mono" spellcheck="false" placeholder=${FUNCTION} value=${value.functions} aria-invalid=${Boolean(problem)} onInput=${(event) => onChange({ ...value, functions: event.target.value })}></textarea>
      ${problem && html`<span class="bad small">${problem}</span>`}
    </label>`;
}

/** A tool that has no switch stays as it is, or goes. */
function Other({ tool, onChange }) {
  const { authorization, ...transport } = tool.transport || {};
  return html`<details class="other-tool"><summary><b>${toolName(tool)}</b> <span class="quiet small">${tool.type.replace(/_/g, " ")}, kept as it is</span></summary>
    <pre class="wrap output" tabindex="0" aria-label=${toolName(tool)}>${pretty(tool.transport ? { ...tool, transport } : tool)}</pre>
    ${hidesSecret(tool) &&
    html`<label>Authorization of ${toolName(tool)}<input type="password" autocomplete="off" placeholder="not shown by the server" value=${authorization || ""} onInput=${(event) => onChange([{ ...tool, transport: { ...transport, ...(event.target.value && { authorization: event.target.value }) } }])} /></label>
      <p class="quiet small">The server never shows it. Whenever you change the tools of this agent, enter it again.</p>`}
    <button type="button" class="plain danger" onClick=${() => onChange([])}>Remove ${toolName(tool)}</button>
  </details>`;
}
