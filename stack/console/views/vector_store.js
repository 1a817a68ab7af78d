// One vector store: its files with their state and error, and a search that shows each chunk with its scores.

import { apiPath, get, post, remove } from "../api.js";
import { bytes } from "../format.js";
import { FileName } from "../parts/pdf_pages.js";
import { DeleteButton, Empty, Failure, Id, Status, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { Uploader } from "../parts/upload.js";
import { hashOf, setParams } from "../route.js";
import { loadSettings, saveSettings } from "../settings.js";
import { html, useEffect, useState } from "../vendor/preact.js";

const RESULTS = 10;
const DEPTH = 50;

export function VectorStore({ id, params }) {
  const [store, setStore] = useState(null);
  const [error, setError] = useState(null);
  const files = usePages(apiPath`vector_stores/${id}/files`);
  const names = useNames(files.rows);
  useEffect(() => void get(apiPath`vector_stores/${id}`).then(setStore, setError), [id, files.rows]);
  const working = (files.rows || []).some((row) => row.status === "in_progress");
  useEffect(() => {
    if (!working) return undefined;
    const timer = setInterval(files.reload, 1500);
    return () => clearInterval(timer);
  }, [working]);
  const attach = async (file) => {
    await post(apiPath`vector_stores/${id}/files`, { file_id: file.id });
    await files.reload();
  };
  const deleted = () => remove(apiPath`vector_stores/${id}`).then(() => (location.hash = hashOf({ view: "files", params: { tab: "vector stores" } })), setError);
  if (error) return html`<div class="page"><header class="bar"><a class="back" href=${hashOf({ view: "files", params: { tab: "vector stores" } })}>Vector stores</a><h1><${Id} id=${id} /></h1></header><${Failure} error=${error} /></div>`;
  const columns = [
    ["File", (row) => html`<${FileName} id=${row.id} name=${names[row.id] || ""} />`],
    ["Id", (row) => html`<${Id} id=${row.id} />`],
    ["State", (row) => html`<${Status} status=${row.status} />${row.last_error && html`<div class="bad small">${row.last_error.message} <span class="mono">${row.last_error.code}</span></div>`}`],
    ["Size", (row) => html`<span class="tabular">${bytes(row.usage_bytes)}</span>`],
    ["Added", (row) => html`<${Time} at=${row.created_at} />`],
    ["", (row) => html`<${DeleteButton} what=${names[row.id] || row.id} onDelete=${() => remove(apiPath`vector_stores/${id}/files/${row.id}`).then(() => files.drop(row.id))} />`],
  ];
  return html`<div class="page">
    <header class="bar">
      <a class="back" href=${hashOf({ view: "files", params: { tab: "vector stores" } })}>Vector stores</a>
      <h1>${store?.name || "Vector store"}</h1>${store && html`<${Status} status=${store.status} />`}
      <span class="grow"></span><button class="primary" disabled=${!store?.file_counts.completed} onClick=${() => askAbout(id)}>Ask about these</button><${DeleteButton} what=${store?.name || id} onDelete=${deleted} />
    </header>
    <p class="facts quiet">
      <${Id} id=${id} />
      ${store && html`<span>${store.file_counts.completed} of ${store.file_counts.total} files</span><span>${bytes(store.usage_bytes)}</span><span>created <${Time} at=${store.created_at} /></span>`}
    </p>
    <${Search} id=${id} query=${params.q || ""} />
    <h2>Files</h2>
    <${Uploader} onDone=${attach} label="Add files" />
    <${Table} label="Files of the vector store" pages=${files} columns=${columns} empty=${html`<${Empty} title="No file is in this vector store." />`} />
  </div>`;
}

/** Open a new chat that searches in the store. */
function askAbout(id) {
  const settings = loadSettings();
  saveSettings({ ...settings, tools: [...new Set([...settings.tools, "file_search"])], vectorStoreIds: id });
  location.hash = hashOf({ view: "playground" });
}

/** The names of files by id: a vector store knows its files by id alone. */
function useNames(rows) {
  const [names, setNames] = useState({});
  useEffect(() => {
    for (const { id } of rows || [])
      if (!(id in names))
        get(apiPath`files/${id}`).then(
          (file) => setNames((all) => ({ ...all, [id]: file.filename })),
          () => setNames((all) => ({ ...all, [id]: "(deleted)" })),
        );
  }, [rows]);
  return names;
}

const keyOf = (result) => JSON.stringify([result.file_id, result.content]);

/** Search three times: as the server ranks, by likeness alone, by words alone; the latter two are the halves' scores. */
async function searchWithScores(id, query) {
  const ranked = (limit, options) => post(apiPath`vector_stores/${id}/search`, { query, max_num_results: limit, ...options }).then((page) => page.data);
  const weights = (embedding_weight, text_weight) => ({ ranking_options: { hybrid_search: { embedding_weight, text_weight } } });
  const [results, byLikeness, byWords] = await Promise.all([ranked(RESULTS, {}), ranked(DEPTH, weights(1, 0)), ranked(DEPTH, weights(0, 1))]);
  const scores = (rows) => new Map(rows.map((row) => [keyOf(row), row.score]));
  const [likeness, words] = [scores(byLikeness), scores(byWords)];
  return results.map((result) => ({ ...result, likeness: likeness.get(keyOf(result)), words: words.get(keyOf(result)) }));
}

function Search({ id, query }) {
  const [results, setResults] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    setResults(null);
    setError(null);
    if (query) searchWithScores(id, query).then(setResults, setError);
  }, [id, query]);
  const submit = (event) => {
    event.preventDefault();
    setParams({ q: event.target.elements.query.value.trim() });
  };
  return html`<form class="row tools" onSubmit=${submit}>
      <input data-search name="query" type="search" class="grow" placeholder="Search in this vector store" aria-label="Search" defaultValue=${query} />
      <button class="primary">Search</button>
    </form>
    ${error && html`<${Failure} error=${error} />`}
    ${results && !results.length && html`<${Empty} title="Nothing matches." />`}
    ${(results || []).map(
      (result, index) => html`<article class="hit" key=${index}>
        <header class="row wrap">
          <span class="quiet tabular">${index + 1}</span><b class="clip">${result.filename}</b><span class="grow"></span>
          <${Score} name="relevance" value=${result.score} /><${Score} name="likeness" value=${result.likeness} /><${Score} name="words" value=${result.words} />
        </header>
        ${result.content.map((part, other) => html`<pre class="wrap output" tabindex="0" aria-label="The chunk that was found" key=${other}>${part.text}</pre>`)}
      </article>`,
    )}`;
}

/** A score from 0 to 1; a chunk that is not among the first of one half has none there. */
const Score = ({ name, value }) =>
  html`<span class="score"><span class="quiet">${name}</span>
    <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect width=${100 * Math.max(0, value || 0)} height="6" /></svg>
    <span class="tabular">${value === undefined ? "–" : value.toFixed(3)}</span></span>`;
