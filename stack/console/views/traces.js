// Traces: the latest responses with how their time was spent; one opens as a waterfall.

import { Empty, Id, Status, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { plain } from "../format.js";
import { hashOf } from "../route.js";
import { html } from "../vendor/preact.js";
import { AgentTrace, AgentTraces } from "./agent_traces.js";

export const Traces = ({ route }) => (route.id ? html`<${AgentTrace} id=${route.id} />` : html`<${AllTraces} />`);

function AllTraces() {
  const pages = usePages("responses", { background: true });
  const columns = [
    ["Trace", (row) => html`<${Id} id=${row.id} href=${hashOf({ view: "responses", id: row.id, tab: "trace" })} />`],
    ["Status", (row) => html`<${Status} status=${row.status} />`],
    ["Model", (row) => row.model],
    ["First words", (row) => html`<span class="clip quiet">${plain(row.preview)}</span>`],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
  ];
  return html`<div class="page">
    <header class="bar"><h1>Traces</h1><span class="grow"></span><button onClick=${pages.reload}>Refresh</button></header>
    <${Table} label="Traces" pages=${pages} columns=${columns} empty=${html`<${Empty} title="No response with recorded events is stored. Responses that run in the background record theirs." />`} />
    <${AgentTraces} />
  </div>`;
}
