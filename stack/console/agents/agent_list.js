// The stored agents.

import { apiPath } from "../api.js";
import { shortId } from "../format.js";
import { DeleteButton, Empty, Id, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf } from "../route.js";
import { html } from "../vendor/preact.js";
import { erase, read } from "./api.js";
import { SectionBar } from "./section_bar.js";
import { toolName } from "./tools.js";

const hrefOf = (id) => hashOf({ view: "agents", id });

const COLUMNS = [
  ["Agent", (row) => html`<a class="clip" href=${hrefOf(row.id)}>${row.name || shortId(row.id)}</a>`],
  ["Model", (row) => html`<span class="clip">${row.model}</span>`],
  ["Tools", (row) => html`<span class="clip quiet">${row.tools.map(toolName).join(", ")}</span>`],
  ["Instructions", (row) => html`<span class="clip quiet" title=${(row.instructions || "").slice(0, 500)}>${(row.instructions || "").slice(0, 200)}</span>`],
  ["Id", (row) => html`<${Id} id=${row.id} />`],
  ["Changed", (row) => html`<${Time} at=${row.updated_at} />`],
];

export function AgentList() {
  const pages = usePages("agents", {}, read);
  const create = html`<a class="button" href=${hrefOf("new")}>New agent</a>`;
  const columns = [
    ...COLUMNS,
    [
      "",
      (row) => html`<span class="row actions"><a class="button" href=${hashOf({ view: "agents", id: "sessions", params: { agent: row.id } })}>Sessions</a>
        <${DeleteButton} what=${row.name || shortId(row.id)} onDelete=${() => erase(apiPath`agents/${row.id}`).then(() => pages.drop(row.id))} /></span>`,
    ],
  ];
  return html`<div class="page agents">
    <${SectionBar} current="agents">${create}<button onClick=${pages.reload}>Refresh</button><//>
    <${Table}
      label="Agents"
      pages=${pages}
      columns=${columns}
      empty=${html`<${Empty} title="There is no agent yet."><p>An agent is a model with instructions and tools. Any client can call it as a model.</p>${create}<//>`}
    />
  </div>`;
}
