// The right panel of a response: Events, Schema, Request, Response, Code.

import { html, useState } from "../vendor/preact.js";
import { CodeSamples } from "./code_samples.js";
import { EventList } from "./event_list.js";
import { Icon } from "./icons.js";
import { JsonTree } from "./json_tree.js";
import { SchemaReport, schemaLabel, useConformance } from "./schema_report.js";
import { Empty, Tabs } from "./states.js";

/** The button that closes a panel at the side. */
export const CloseSide = ({ onClose }) => html`<button class="plain close-side" aria-label="Close the panel" onClick=${onClose}><${Icon} name="close" /></button>`;

/** `replay` is {after, start(number), clear()} where the events of a stored response can be sent again, else null. */
export function Inspector({ rows, startedAt, request, response, selected, onSelect, replay = null, waits, onClose }) {
  const names = request ? ["Events", "Schema", "Request", "Response", "Code"] : ["Events", "Schema", "Response"];
  const [tab, setTab] = useState("Events");
  const [event, setEvent] = useState(null);
  // the item of the selected event is highlighted; only an item that was selected elsewhere filters the events
  const [highlighted, setHighlighted] = useState(null);
  const current = names.includes(tab) ? tab : "Events";
  const check = useConformance(rows, response);
  const highlight = (item) => {
    setHighlighted(item);
    onSelect?.(item);
  };
  const show = (wanted) => {
    setEvent(wanted);
    highlight(null);
    setTab("Events");
  };
  return html`<aside class="inspector" aria-label="Inspector">
    ${onClose && html`<${CloseSide} onClose=${onClose} />`}
    <${Tabs} names=${names} labels=${{ Schema: schemaLabel(check) }} current=${current} onChange=${setTab} label="Inspector">
      ${current === "Events" &&
      (rows.length || replay
        ? html`<${EventList}
            rows=${rows}
            startedAt=${startedAt}
            itemId=${selected === highlighted ? null : selected}
            onItem=${highlight}
            selected=${event}
            onEvent=${setEvent}
            bad=${check.bad}
            replay=${replay}
          />`
        : html`<${Empty} title=${waits || "Events appear here as the server sends them."} />`)}
      ${current === "Schema" && html`<${SchemaReport} check=${check} onEvent=${show} />`}
      ${current === "Request" && html`<${JsonTree} value=${request} open=${3} />`}
      ${current === "Response" && (response ? html`<${JsonTree} value=${response} open=${2} />` : html`<${Empty} title="No response yet." />`)}
      ${current === "Code" && html`<${CodeSamples} body=${request} />`}
    <//>
  </aside>`;
}
