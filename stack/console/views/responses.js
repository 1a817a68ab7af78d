// Stored responses: a listing with filters; each row opens the response.

import { apiPath, remove } from "../api.js";
import { count, plain, shortId } from "../format.js";
import { Icon } from "../parts/icons.js";
import { DeleteButton, Empty, Id, Status, Time } from "../parts/states.js";
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

/** A box that searches on Enter; an empty one ends the search. `params.search` holds the text. */
export function SearchBox({ params, label }) {
  const submit = (event) => {
    event.preventDefault();
    setParams({ search: event.target.elements.search.value.trim() });
  };
  return html`<form class="search" onSubmit=${submit}>
    <input
      key=${params.search || ""}
      data-search
      name="search"
      type="search"
      placeholder=${label}
      aria-label=${label}
      defaultValue=${params.search || ""}
      onSearch=${(event) => !event.target.value && setParams({ search: "" })}
    />
  </form>`;
}

export const responseColumns = [
  ["Response", (row) => html`<${Id} id=${row.id} href=${hashOf({ view: "responses", id: row.id })} />`],
  ["Status", (row) => html`<${Status} status=${row.status} />`],
  ["Model", (row) => row.model],
  ["First words", (row) => html`<span class="clip quiet" title=${row.preview || ""}>${row.question && html`<b>${row.question}</b> `}${plain(row.preview)}</span>`],
  ["Tokens", (row) => html`<span class="tabular">${row.usage ? count(row.usage.total_tokens) : ""}</span>`],
  ["Created", (row) => html`<${Time} at=${row.created_at} />`],
];

export function Responses({ route, models }) {
  const { status, model, order, search, conversation } = route.params;
  const pages = usePages("responses", { status, model, order, search, conversation });
  const columns = [
    ...responseColumns,
    ["", (row) => html`<${DeleteButton} what=${shortId(row.id)} onDelete=${() => remove(apiPath`responses/${row.id}`).then(() => pages.drop(row.id))} />`],
  ];
  const filtered = status || model || search || conversation;
  return html`<div class="page">
    <header class="bar"><h1>Responses</h1><span class="grow"></span>
      <${SearchBox} params=${route.params} label="Search questions, answers, metadata" />
      <button onClick=${pages.reload}>Refresh</button>
    </header>
    <${Filters} params=${route.params} models=${models}>
      <select aria-label="Order" value=${order || "desc"} onChange=${(event) => setParams({ order: event.target.value })}>
        <option value="desc">newest first</option><option value="asc">oldest first</option>
      </select>
      ${conversation &&
      html`<span class="chip">of ${shortId(conversation)}<button type="button" class="plain" aria-label="Of all conversations" onClick=${() => setParams({ conversation: "" })}><${Icon} name="close" /></button></span>`}
    <//>
    <${Table}
      label="Responses"
      pages=${pages}
      columns=${columns}
      empty=${html`<${Empty} title=${filtered ? "No stored response matches." : "No response is stored yet."}>
        ${filtered
          ? html`<button onClick=${() => setParams({ status: "", model: "", search: "", conversation: "" })}>Show all</button>`
          : html`<a class="button" href=${hashOf({ view: "playground" })}>Open the Playground</a>`}
      <//>`}
    />
  </div>`;
}
