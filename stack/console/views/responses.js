// Stored responses: a listing with filters; each row opens the response.

import { count } from "../format.js";
import { Empty, Id, Status, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf, setParams } from "../route.js";
import { html } from "../vendor/preact.js";

const STATUSES = ["completed", "failed", "incomplete", "cancelled", "in_progress", "queued"];

export function Filters({ params, models, children }) {
  const set = (name) => (event) => setParams({ [name]: event.target.value });
  return html`<div class="row tools">
    <select aria-label="Status" value=${params.status || ""} onChange=${set("status")}>
      <option value="">any status</option>
      ${STATUSES.map((status) => html`<option key=${status} value=${status}>${status.replace("_", " ")}</option>`)}
    </select>
    <select aria-label="Model" value=${params.model || ""} onChange=${set("model")}>
      <option value="">any model</option>
      ${models.map((model) => html`<option key=${model.id}>${model.id}</option>`)}
    </select>
    ${children}
  </div>`;
}

export const responseColumns = [
  ["Response", (row) => html`<${Id} id=${row.id} href=${hashOf({ view: "responses", id: row.id })} />`],
  ["Status", (row) => html`<${Status} status=${row.status} />`],
  ["Model", (row) => row.model],
  ["First words", (row) => html`<span class="clip quiet">${row.preview || ""}</span>`],
  ["Tokens", (row) => html`<span class="tabular">${row.usage ? count(row.usage.total_tokens) : ""}</span>`],
  ["Created", (row) => html`<${Time} at=${row.created_at} />`],
];

export function Responses({ route, models }) {
  const { status, model, order } = route.params;
  const pages = usePages("responses", { status, model, order });
  const goTo = (event) => {
    event.preventDefault();
    const id = event.target.elements.id.value.trim();
    if (id) location.hash = hashOf({ view: "responses", id });
  };
  return html`<div class="page">
    <header class="bar"><h1>Responses</h1><span class="grow"></span>
      <form onSubmit=${goTo}><input data-search name="id" type="search" class="mono" placeholder="resp_… opens a response" aria-label="Open a response by its id" /></form>
      <button onClick=${pages.reload}>Refresh</button>
    </header>
    <${Filters} params=${route.params} models=${models}>
      <select aria-label="Order" value=${order || "desc"} onChange=${(event) => setParams({ order: event.target.value })}>
        <option value="desc">newest first</option><option value="asc">oldest first</option>
      </select>
    <//>
    <${Table}
      label="Responses"
      pages=${pages}
      columns=${responseColumns}
      empty=${html`<${Empty} title=${status || model ? "No stored response matches." : "No response is stored yet."}>
        <a class="button" href=${hashOf({ view: "playground" })}>Open the Playground</a>
      <//>`}
    />
  </div>`;
}
