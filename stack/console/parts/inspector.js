// The right panel of a response: Events, Request, Response, Code.

import { html, useState } from "../vendor/preact.js";
import { CodeSamples } from "./code_samples.js";
import { EventList } from "./event_list.js";
import { JsonTree } from "./json_tree.js";
import { Empty, Tabs } from "./states.js";

const NAMES = ["Events", "Request", "Response", "Code"];

export function Inspector({ rows, startedAt, request, response, selected, onSelect, tab, onTab }) {
  const [own, setOwn] = useState("Events");
  const current = tab || own;
  const change = onTab || setOwn;
  return html`<aside class="inspector" aria-label="Inspector">
    <${Tabs} names=${NAMES} current=${current} onChange=${change} label="Inspector">
      ${current === "Events" &&
      (rows.length
        ? html`<${EventList} rows=${rows} startedAt=${startedAt} itemId=${selected} onItem=${onSelect} />`
        : html`<${Empty} title="Events appear here as the server sends them." />`)}
      ${current === "Request" && (request ? html`<${JsonTree} value=${request} open=${3} />` : html`<${Empty} title="Nothing was sent yet." />`)}
      ${current === "Response" && (response ? html`<${JsonTree} value=${response} open=${2} />` : html`<${Empty} title="No response yet." />`)}
      ${current === "Code" && (request ? html`<${CodeSamples} body=${request} />` : html`<${Empty} title="Send a request to see it as code." />`)}
    <//>
  </aside>`;
}
