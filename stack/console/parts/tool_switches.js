// The tools of the server as switches. One that is not there is grey, with the reason and the part of the config that brings it.

import { apiPath, get } from "../api.js";
import { HOSTED_TOOLS, reasonOf } from "../tools.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { Status, useUniqueId } from "./states.js";

export function ToolSwitches({ settings, tools, onChange }) {
  const toggle = (field, name) => (event) =>
    onChange({ ...settings, [field]: event.target.checked ? [...settings[field], name] : settings[field].filter((other) => other !== name) });
  return html`<fieldset class="wide switches"><legend>Tools of the server</legend>
    ${HOSTED_TOOLS.map(
      ([type, label, effect]) => html`<${Switch} key=${type} label=${label} note=${effect} reason=${reasonOf(tools, type)} isOn=${settings.tools.includes(type)} onChange=${toggle("tools", type)} />
        ${type === "file_search" && settings.tools.includes(type) && !reasonOf(tools, type) && html`<${Stores} stores=${tools.stores} ids=${settings.vectorStoreIds} onChange=${(vectorStoreIds) => onChange({ ...settings, vectorStoreIds })} />`}`,
    )}
    ${tools.servers.map((label) => html`<${ServerSwitch} key=${`mcp ${label}`} label=${label} isOn=${settings.servers.includes(label)} onChange=${toggle("servers", label)} />`)}
    ${tools.isKnown && reasonOf(tools, "mcp") && html`<${Switch} label="MCP" reason=${reasonOf(tools, "mcp")} />`}
  </fieldset>`;
}

const SERVER_STATES = { ready: "signed in", needs_sign_in: "needs sign-in", failed: "failed" };

/** An MCP server of the run config with its state: the server is asked once for as long as the panel is open. */
function ServerSwitch({ label, isOn, onChange }) {
  const [server, setServer] = useState(null);
  useEffect(() => void get(apiPath`stack/tool_servers/${label}`).then(setServer, () => setServer({ state: "" })), [label]);
  const state = server?.state;
  const note = state === "ready" ? `${SERVER_STATES.ready} · ${server.tools.length} tools; each call asks you first` : state ? server.reason : "MCP server; each call asks you first";
  return html`<${Switch} label=${label} note=${note} isOn=${isOn} onChange=${onChange}>
    ${state && html`<${Status} status=${{ ready: "completed", needs_sign_in: "incomplete", failed: "failed" }[state]} word=${SERVER_STATES[state]} />`}
  <//>`;
}

/** A tool that is on although the server lacks it can be switched off. */
export function Switch({ label, note, reason, isOn = false, onChange, children }) {
  const id = useUniqueId();
  return html`<div class="switch ${reason ? "absent" : ""}">
    <label class="check"><input type="checkbox" checked=${isOn} disabled=${Boolean(reason) && !isOn} aria-describedby=${id} onChange=${onChange} /> ${label} ${children}</label>
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
