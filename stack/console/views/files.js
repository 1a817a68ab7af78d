// Files and vector stores: upload with progress, state and error of each file, search with scores.

import { get, post, remove, upload } from "../api.js";
import { bytes } from "../format.js";
import { DeleteButton, Empty, Failure, Id, Status, Tabs, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf } from "../route.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";

export function Files({ route }) {
  if (route.id) return html`<${VectorStore} id=${route.id} />`;
  const tab = route.params.tab || "files";
  return html`<div class="page">
    <header class="bar"><h1>Files and vector stores</h1></header>
    <${Tabs} label="Kinds" names=${["files", "vector stores"]} current=${tab} onChange=${(name) => (location.hash = hashOf({ view: "files", params: { tab: name } }))}>
      ${tab === "files" ? html`<${FileList} />` : html`<${StoreList} />`}
    <//>
  </div>`;
}

/** Uploads in progress: {name, share, error}; `start` sends files one after the other. */
function useUploads(onDone) {
  const [uploads, setUploads] = useState([]);
  const change = (entry, fields) => {
    Object.assign(entry, fields);
    setUploads((all) => [...all]);
  };
  const start = async (files) => {
    const entries = [...files].map((file) => ({ file, name: file.name, share: 0, error: null }));
    setUploads((all) => [...all, ...entries]);
    for (const entry of entries) {
      const form = new FormData();
      form.set("purpose", "assistants");
      form.set("file", entry.file);
      try {
        const stored = await upload("files", form, (share) => change(entry, { share }));
        await onDone(stored);
        setUploads((all) => all.filter((other) => other !== entry));
      } catch (error) {
        change(entry, { error });
      }
    }
  };
  return [uploads, start];
}

function Uploader({ onDone, label = "Upload files" }) {
  const [uploads, start] = useUploads(onDone);
  const chooser = useRef(null);
  const dropped = (event) => {
    event.preventDefault();
    start(event.dataTransfer.files);
  };
  return html`<div class="drop" onDragOver=${(event) => event.preventDefault()} onDrop=${dropped}>
    <input ref=${chooser} type="file" multiple hidden aria-hidden="true" tabindex="-1" onChange=${(event) => start(event.target.files)} />
    <button class="primary" onClick=${() => chooser.current.click()}>${label}</button> <span class="quiet">or drop them here</span>
    ${uploads.map(
      (entry) => html`<div key=${entry.name} class="row">
        <span>${entry.name}</span>
        ${entry.error ? html`<span class="bad">${entry.error.message}</span>` : html`<progress max="1" value=${entry.share} aria-label="Upload of ${entry.name}"></progress>`}
      </div>`,
    )}
  </div>`;
}

function FileList() {
  const pages = usePages("files");
  const columns = [
    ["File", (row) => row.filename],
    ["Id", (row) => html`<${Id} id=${row.id} />`],
    ["Size", (row) => html`<span class="tabular">${bytes(row.bytes)}</span>`],
    ["Purpose", (row) => row.purpose],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
    ["", (row) => html`<${DeleteButton} what=${row.filename} onDelete=${() => remove(`files/${row.id}`).then(() => pages.drop(row.id))} />`],
  ];
  return html`<${Uploader} onDone=${pages.reload} />
    <${Table} label="Files" pages=${pages} columns=${columns} empty=${html`<${Empty} title="No file is stored yet." />`} />`;
}

function StoreList() {
  const pages = usePages("vector_stores");
  const [name, setName] = useState("");
  const [error, setError] = useState(null);
  const create = async (event) => {
    event.preventDefault();
    try {
      const store = await post("vector_stores", { name });
      location.hash = hashOf({ view: "files", id: store.id });
    } catch (failure) {
      setError(failure);
    }
  };
  const columns = [
    ["Vector store", (row) => html`<a href=${hashOf({ view: "files", id: row.id })}>${row.name || "unnamed"}</a>`],
    ["Id", (row) => html`<${Id} id=${row.id} />`],
    ["Files", (row) => html`<span class="tabular">${row.file_counts.completed} of ${row.file_counts.total}</span>`],
    ["Status", (row) => html`<${Status} status=${row.status} />`],
    ["Size", (row) => html`<span class="tabular">${bytes(row.usage_bytes)}</span>`],
    ["", (row) => html`<${DeleteButton} what=${row.name || row.id} onDelete=${() => remove(`vector_stores/${row.id}`).then(() => pages.drop(row.id))} />`],
  ];
  return html`<form class="row tools" onSubmit=${create}>
      <input placeholder="Name" aria-label="Name of a new vector store" value=${name} onInput=${(event) => setName(event.target.value)} /><button disabled=${!name}>New vector store</button>
    </form>
    ${error && html`<${Failure} error=${error} />`}
    <${Table} label="Vector stores" pages=${pages} columns=${columns} empty=${html`<${Empty} title="There is no vector store yet. Name one to make files searchable." />`} />`;
}

function VectorStore({ id }) {
  const [store, setStore] = useState(null);
  const [error, setError] = useState(null);
  const files = usePages(`vector_stores/${id}/files`);
  useEffect(() => {
    get(`vector_stores/${id}`).then(setStore, setError);
  }, [id]);
  const working = (files.rows || []).some((row) => row.status === "in_progress");
  useEffect(() => {
    if (!working) return undefined;
    const timer = setInterval(files.reload, 1500);
    return () => clearInterval(timer);
  }, [working]);
  const attach = async (file) => {
    await post(`vector_stores/${id}/files`, { file_id: file.id });
    await files.reload();
  };
  if (error) return html`<${Failure} error=${error} />`;
  const columns = [
    ["File", (row) => html`<${Id} id=${row.id} />`],
    ["Status", (row) => html`<${Status} status=${row.status} />`],
    ["Error", (row) => html`<span class="bad">${row.last_error?.message || ""}</span>`],
    ["Size", (row) => html`<span class="tabular">${bytes(row.usage_bytes)}</span>`],
    ["", (row) => html`<${DeleteButton} what=${row.id} onDelete=${() => remove(`vector_stores/${id}/files/${row.id}`).then(() => files.drop(row.id))} />`],
  ];
  return html`<div class="page">
    <header class="bar"><h1>${store?.name || "Vector store"}</h1><${Id} id=${id} /></header>
    <${Search} id=${id} />
    <h2>Files</h2>
    <${Uploader} onDone=${attach} label="Add files" />
    <${Table} label="Files of the vector store" pages=${files} columns=${columns} empty=${html`<${Empty} title="No file is in this vector store." />`} />
  </div>`;
}

function Search({ id }) {
  const [query, setQuery] = useState("");
  const [results, setResults] = useState(null);
  const [error, setError] = useState(null);
  const search = async (event) => {
    event.preventDefault();
    try {
      setError(null);
      setResults((await post(`vector_stores/${id}/search`, { query, max_num_results: 10 })).data);
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<form class="row tools" onSubmit=${search}>
      <input data-search type="search" class="grow" placeholder="Search in this vector store" aria-label="Search" value=${query} onInput=${(event) => setQuery(event.target.value)} />
      <button class="primary" disabled=${!query}>Search</button>
    </form>
    ${error && html`<${Failure} error=${error} />`}
    ${results && !results.length && html`<${Empty} title="Nothing matches." />`}
    ${(results || []).map(
      (result, index) => html`<article class="hit" key=${index}>
        <header class="row"><b>${result.filename}</b><meter min="0" max="1" value=${result.score} aria-label="Score"></meter><span class="tabular">${result.score.toFixed(3)}</span></header>
        ${result.content.map((part, other) => html`<pre class="wrap" key=${other}>${part.text}</pre>`)}
      </article>`,
    )}`;
}
