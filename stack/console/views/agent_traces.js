// Agents' traces: the list of them, one with its spans and the responses that it names, and those of one response.

import { apiPath, get, remove } from "../api.js";
import { ms } from "../format.js";
import { AgentSpans } from "../parts/agent_spans.js";
import { DeleteButton, Empty, Failure, Id, Skeleton, Status, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf } from "../route.js";
import { html, useEffect, useState } from "../vendor/preact.js";

const MOST_RESPONSES = 20;

const took = (trace) => (trace.started_at && trace.ended_at ? ms(Date.parse(trace.ended_at) - Date.parse(trace.started_at)) : "");

/** The traces that agents sent, newest first. */
export function AgentTraces() {
  const pages = usePages("traces", {});
  const columns = [
    ["Trace", (row) => html`<${Id} id=${row.id} href=${hashOf({ view: "traces", id: row.id })} />`],
    ["Workflow", (row) => html`<span class="clip">${row.workflow_name || ""}</span>`],
    ["Group", (row) => html`<span class="clip quiet">${row.group_id || ""}</span>`],
    ["Spans", (row) => html`${row.span_count}${row.error_count > 0 && html` <b class="bad">${row.error_count} failed</b>`}`],
    ["Took", took],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
  ];
  const empty = html`<${Empty} title="No agent has sent a trace yet.">
    <p class="quiet">Point the exporter of an Agents SDK here: <code>endpoint: "${new URL("v1/traces/ingest", document.baseURI).href}"</code>.</p>
  <//>`;
  return html`<section aria-label="Agents' traces">
    <header class="bar"><h2>Agents' traces</h2><span class="grow"></span><button onClick=${pages.reload}>Refresh</button></header>
    <${Table} label="Agents' traces" pages=${pages} columns=${columns} empty=${empty} />
  </section>`;
}

/** Load a trace; return [trace, error]. */
function useTrace(id) {
  const [state, setState] = useState([null, null]);
  useEffect(() => {
    const stops = new AbortController();
    setState([null, null]);
    get(apiPath`traces/${id}`, {}, stops.signal).then(
      (trace) => setState([trace, null]),
      (error) => error.name !== "AbortError" && setState([null, error]),
    );
    return () => stops.abort();
  }, [id]);
  return state;
}

export function AgentTrace({ id }) {
  const [trace, error] = useTrace(id);
  if (error) return html`<div class="page"><${Failure} error=${error} /></div>`;
  if (!trace) return html`<div class="page"><${Skeleton} /></div>`;
  const deleted = async () => {
    await remove(apiPath`traces/${id}`);
    location.hash = hashOf({ view: "traces" });
  };
  return html`<div class="page">
    <header class="bar">
      <h1>${trace.workflow_name || "Trace"}</h1><${Id} id=${trace.id} />
      <span class="grow"></span>
      <a class="button" href=${hashOf({ view: "traces" })}>All traces</a>
      <${DeleteButton} what=${trace.id} onDelete=${deleted} />
    </header>
    <p class="facts quiet">
      <${Time} at=${trace.created_at} /><span>${trace.span_count} spans</span><span>${took(trace)}</span>
      ${trace.group_id && html`<span>group ${trace.group_id}</span>`}
      ${trace.error_count > 0 && html`<b class="bad">${trace.error_count} failed</b>`}
      ${trace.dropped_spans > 0 && html`<b class="bad">${trace.dropped_spans} spans were dropped: the trace is full</b>`}
    </p>
    <${AgentSpans} spans=${trace.spans} />
    <${NamedResponses} ids=${trace.response_ids} />
  </div>`;
}

/** The stored responses that a trace names, as this server recorded them. */
function NamedResponses({ ids }) {
  const [rows, setRows] = useState(null);
  useEffect(() => {
    let isShown = true;
    const load = (id) => get(apiPath`responses/${id}`).catch((error) => ({ id, error }));
    Promise.all(ids.slice(0, MOST_RESPONSES).map(load)).then((loaded) => isShown && setRows(loaded));
    return () => (isShown = false);
  }, [ids.join(" ")]);
  if (!ids.length) return null;
  if (!rows) return html`<${Skeleton} rows=${2} />`;
  return html`<h2>Responses</h2>
    <div class="scroll"><table class="list" aria-label="Responses of the trace">
      <thead><tr><th scope="col">Response</th><th scope="col">Status</th><th scope="col">Model</th><th scope="col">Tokens</th></tr></thead>
      <tbody>${rows.map(
        (row) => html`<tr key=${row.id}>
          <td data-label="Response"><${Id} id=${row.id} href=${hashOf({ view: "responses", id: row.id, tab: "trace" })} /></td>
          <td data-label="Status">${row.error ? html`<span class="quiet">not stored here</span>` : html`<${Status} status=${row.status} />`}</td>
          <td data-label="Model">${row.model || ""}</td>
          <td data-label="Tokens">${row.usage ? `${row.usage.input_tokens} in · ${row.usage.output_tokens} out` : ""}</td>
        </tr>`,
      )}</tbody>
    </table></div>
    ${ids.length > MOST_RESPONSES && html`<p class="quiet">and ${ids.length - MOST_RESPONSES} more</p>`}`;
}

/** The agents' spans around one response, below its own waterfall. */
export function SpansOfResponse({ id }) {
  const { rows, error } = usePages("traces", { response_id: id, limit: 5 });
  if (error && error.code !== "not_configured") return html`<${Failure} error=${error} />`;
  if (!rows?.length) return null;
  return rows.map((row) => html`<${SpansOfTrace} key=${row.id} id=${row.id} responseId=${id} />`);
}

function SpansOfTrace({ id, responseId }) {
  const [trace, error] = useTrace(id);
  if (error) return html`<${Failure} error=${error} />`;
  if (!trace) return html`<${Skeleton} rows=${3} />`;
  return html`<section aria-label="Agents' spans">
    <h2>Agents' spans · <a href=${hashOf({ view: "traces", id })}>${trace.workflow_name || id}</a></h2>
    <${AgentSpans} spans=${trace.spans} responseId=${responseId} />
  </section>`;
}
