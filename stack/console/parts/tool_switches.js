// The tools of the server as switches. One that is not there is grey, with the reason and the part of the config that brings it.

import { HOSTED_TOOLS, reasonOf } from "../tools.js";
import { html } from "../vendor/preact.js";
import { useUniqueId } from "./states.js";

export function ToolSwitches({ settings, tools, onChange }) {
  const toggle = (field, name) => (event) =>
    onChange({ ...settings, [field]: event.target.checked ? [...settings[field], name] : settings[field].filter((other) => other !== name) });
  return html`<fieldset class="wide switches"><legend>Tools of the server</legend>
    ${HOSTED_TOOLS.map(
      ([type, label, effect]) => html`<${Switch} key=${type} label=${label} note=${effect} reason=${reasonOf(tools, type)} isOn=${settings.tools.includes(type)} onChange=${toggle("tools", type)} />
        ${type === "file_search" && settings.tools.includes(type) && !reasonOf(tools, type) && html`<${Stores} stores=${tools.stores} ids=${settings.vectorStoreIds} onChange=${(vectorStoreIds) => onChange({ ...settings, vectorStoreIds })} />`}`,
    )}
    ${tools.servers.map((label) => html`<${Switch} key=${`mcp ${label}`} label=${label} note="MCP server; each call asks you first" isOn=${settings.servers.includes(label)} onChange=${toggle("servers", label)} />`)}
    ${tools.isKnown && reasonOf(tools, "mcp") && html`<${Switch} label="MCP" reason=${reasonOf(tools, "mcp")} />`}
  </fieldset>`;
}

/** A tool that is on although the server lacks it can be switched off. */
export function Switch({ label, note, reason, isOn = false, onChange }) {
  const id = useUniqueId();
  return html`<div class="switch ${reason ? "absent" : ""}">
    <label class="check"><input type="checkbox" checked=${isOn} disabled=${Boolean(reason) && !isOn} aria-describedby=${id} onChange=${onChange} /> ${label}</label>
    <span id=${id} class="quiet small">${reason || note}</span>
  </div>`;
}

/** The stores to search in by name; ids may be typed, of stores that are not listed here. */
function Stores({ stores, ids, onChange }) {
  const chosen = ids.split(/[\s,]+/).filter(Boolean);
  const toggle = (id) => (event) => onChange((event.target.checked ? [...chosen, id] : chosen.filter((other) => other !== id)).join(" "));
  return html`<div class="stores" role="group" aria-label="Ask about these">
    ${stores.map((store) => html`<label class="check" key=${store.id}><input type="checkbox" checked=${chosen.includes(store.id)} onChange=${toggle(store.id)} /> ${store.name || store.id} <span class="quiet small tabular">${store.file_counts?.completed ?? 0} files</span></label>`)}
    <label>${stores.length ? "or their ids" : "Vector stores"}<input class="mono" placeholder="vs_…" value=${ids} onInput=${(event) => onChange(event.target.value)} /></label>
  </div>`;
}
