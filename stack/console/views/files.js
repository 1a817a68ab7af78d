// Files, vector stores and containers: the three lists.

import { apiPath, post, remove } from "../api.js";
import { bytes } from "../format.js";
import { FileName } from "../parts/pdf_pages.js";
import { DeleteButton, Download, Empty, Failure, Id, Status, Tabs, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { Uploader } from "../parts/upload.js";
import { hashOf } from "../route.js";
import { html, useState } from "../vendor/preact.js";
import { Container } from "./container.js";
import { VectorStore } from "./vector_store.js";

const KINDS = { files: FileList, "vector stores": StoreList, containers: ContainerList };

export function Files({ route }) {
  if (/^(cntr|container)_/.test(route.id)) return html`<${Container} id=${route.id} />`;
  if (route.id) return html`<${VectorStore} id=${route.id} params=${route.params} />`;
  const tab = KINDS[route.params.tab] ? route.params.tab : "files";
  return html`<div class="page">
    <header class="bar"><h1>Files</h1></header>
    <${Tabs} label="Kinds" names=${Object.keys(KINDS)} current=${tab} onChange=${(name) => (location.hash = hashOf({ view: "files", params: { tab: name } }))}>
      <${KINDS[tab]} key=${tab} />
    <//>
  </div>`;
}

function FileList() {
  const pages = usePages("files");
  const columns = [
    ["File", (row) => html`<${FileName} id=${row.id} name=${row.filename} />`],
    ["Id", (row) => html`<${Id} id=${row.id} />`],
    ["State", (row) => html`<${FileState} file=${row} />`],
    ["Size", (row) => html`<span class="tabular">${bytes(row.bytes)}</span>`],
    ["Purpose", (row) => row.purpose],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
    [
      "",
      (row) => html`<span class="row"><${Download} path=${apiPath`files/${row.id}/content`} name=${row.filename} />
        <${DeleteButton} what=${row.filename} onDelete=${() => remove(apiPath`files/${row.id}`).then(() => pages.drop(row.id))} /></span>`,
    ],
  ];
  return html`<${Uploader} onDone=${pages.reload} />
    <${Table} label="Files" pages=${pages} columns=${columns} empty=${html`<${Empty} title="No file is stored yet." />`} />`;
}

const FileState = ({ file }) => html`<${Status} status=${file.status === "error" ? "failed" : "completed"} word=${file.status} />
  ${file.status_details && html`<div class="bad small">${file.status_details}</div>`}
  ${file.expires_at && html`<div class="quiet small">until <${Time} at=${file.expires_at} /></div>`}`;

/** A form with one name; `create` returns a promise. */
function NewByName({ label, create }) {
  const [name, setName] = useState("");
  const [error, setError] = useState(null);
  const submit = (event) => {
    event.preventDefault();
    create(name).catch(setError);
  };
  return html`<form class="row tools" onSubmit=${submit}>
      <input placeholder="Name" aria-label="Name" value=${name} onInput=${(event) => setName(event.target.value)} /><button disabled=${!name.trim()}>${label}</button>
    </form>
    ${error && html`<${Failure} error=${error} />`}`;
}

const open = ({ id }) => (location.hash = hashOf({ view: "files", id }));

function StoreList() {
  const pages = usePages("vector_stores");
  const columns = [
    ["Vector store", (row) => html`<a class="clip" href=${hashOf({ view: "files", id: row.id })}>${row.name || "unnamed"}</a>`],
    ["Id", (row) => html`<${Id} id=${row.id} />`],
    ["Files", (row) => html`<span class="tabular">${row.file_counts.completed} of ${row.file_counts.total}</span>${row.file_counts.failed ? html` <span class="bad small">${row.file_counts.failed} failed</span>` : ""}`],
    ["Status", (row) => html`<${Status} status=${row.status} />`],
    ["Size", (row) => html`<span class="tabular">${bytes(row.usage_bytes)}</span>`],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
    ["", (row) => html`<${DeleteButton} what=${row.name || row.id} onDelete=${() => remove(apiPath`vector_stores/${row.id}`).then(() => pages.drop(row.id))} />`],
  ];
  return html`<${NewByName} label="New vector store" create=${(name) => post("vector_stores", { name }).then(open)} />
    <${Table} label="Vector stores" pages=${pages} columns=${columns} empty=${html`<${Empty} title="There is no vector store yet. Name one to make files searchable." />`} />`;
}

function ContainerList() {
  const pages = usePages("containers");
  const columns = [
    ["Container", (row) => html`<a class="clip" href=${hashOf({ view: "files", id: row.id })}>${row.name || "unnamed"}</a>`],
    ["Id", (row) => html`<${Id} id=${row.id} />`],
    ["Status", (row) => html`<${Status} status=${row.status} />`],
    ["Memory", (row) => row.memory_limit || ""],
    ["Last used", (row) => html`<${Time} at=${row.last_active_at || row.created_at} />`],
    ["", (row) => html`<${DeleteButton} what=${row.name || row.id} onDelete=${() => remove(apiPath`containers/${row.id}`).then(() => pages.drop(row.id))} />`],
  ];
  return html`<${NewByName} label="New container" create=${(name) => post("containers", { name }).then(open)} />
    <${Table}
      label="Containers"
      pages=${pages}
      columns=${columns}
      empty=${html`<${Empty} title="There is no container. The code interpreter makes one when a response runs Python." />`}
    />`;
}
