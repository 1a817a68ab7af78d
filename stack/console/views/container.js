// One container of the code interpreter: its files to download, delete and add.

import { apiPath, get, remove } from "../api.js";
import { bytes } from "../format.js";
import { DeleteButton, Download, Empty, Failure, Id, Status, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { Uploader } from "../parts/upload.js";
import { hashOf } from "../route.js";
import { html, useEffect, useState } from "../vendor/preact.js";

export const baseName = (path) => path.split("/").at(-1) || path;

export function Container({ id }) {
  const [container, setContainer] = useState(null);
  const [error, setError] = useState(null);
  const files = usePages(apiPath`containers/${id}/files`);
  useEffect(() => void get(apiPath`containers/${id}`).then(setContainer, setError), [id]);
  const deleted = () => remove(apiPath`containers/${id}`).then(() => (location.hash = hashOf({ view: "files", params: { tab: "containers" } })), setError);
  if (error) return html`<div class="page"><header class="bar"><a class="back" href=${hashOf({ view: "files", params: { tab: "containers" } })}>Containers</a><h1><${Id} id=${id} /></h1></header><${Failure} error=${error} /></div>`;
  const columns = [
    ["File", (row) => html`<span class="clip mono" title=${row.path}>${row.path}</span>`],
    ["Size", (row) => html`<span class="tabular">${bytes(row.bytes)}</span>`],
    ["Source", (row) => row.source],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
    [
      "",
      (row) => html`<span class="row"><${Download} path=${apiPath`containers/${id}/files/${row.id}/content`} name=${baseName(row.path)} />
        <${DeleteButton} what=${row.path} onDelete=${() => remove(apiPath`containers/${id}/files/${row.id}`).then(() => files.drop(row.id))} /></span>`,
    ],
  ];
  return html`<div class="page">
    <header class="bar">
      <a class="back" href=${hashOf({ view: "files", params: { tab: "containers" } })}>Containers</a>
      <h1>${container?.name || "Container"}</h1>${container && html`<${Status} status=${container.status} />`}
      <span class="grow"></span><button onClick=${files.reload}>Refresh</button><${DeleteButton} what=${container?.name || id} onDelete=${deleted} />
    </header>
    <p class="facts quiet">
      <${Id} id=${id} />
      ${container && html`<span>created <${Time} at=${container.created_at} /></span>`}
      ${container?.last_active_at && html`<span>last used <${Time} at=${container.last_active_at} /></span>`}
      ${container?.expires_after && html`<span>expires after ${container.expires_after.minutes} min unused</span>`}
      ${container?.memory_limit && html`<span>memory ${container.memory_limit}</span>`}
    </p>
    <${Uploader} path=${apiPath`containers/${id}/files`} fields=${{}} onDone=${files.reload} label="Add files" />
    <${Table} label="Files of the container" pages=${files} columns=${columns} empty=${html`<${Empty} title="No file is in this container." />`} />
  </div>`;
}
