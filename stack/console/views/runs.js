// Background responses: what waits, what runs, follow and cancel.

import { cancelResponse, get } from "../api.js";
import { ms } from "../format.js";
import { Empty, Failure, Status } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf } from "../route.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { Filters, SearchBox, responseColumns } from "./responses.js";

const REFRESH_MS = 3000;

export function Runs({ route, models }) {
  const { status, model, search } = route.params;
  const pages = usePages("responses", { background: true, status, model, search });
  const [error, setError] = useState(null);
  const overview = useOverview(pages.rows);
  const active = (pages.rows || []).some((row) => ["queued", "in_progress"].includes(row.status));
  useEffect(() => {
    if (!active) return undefined;
    const timer = setInterval(() => document.visibilityState === "visible" && pages.reload(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [active]);
  const cancel = (row) => cancelResponse(row.id).then(pages.reload, setError);
  const [id, state, model_, words, , created] = responseColumns;
  const columns = [
    id,
    state,
    ...(overview ? [["Where", (row) => html`<${Where} row=${row} overview=${overview} />`]] : []),
    model_,
    words,
    created,
    [
      "",
      (row) =>
        ["queued", "in_progress"].includes(row.status)
          ? html`<span class="row"><a class="button" href=${hashOf({ view: "responses", id: row.id })}>Follow</a><button onClick=${() => cancel(row)}>Cancel</button></span>`
          : html`<a class="button" href=${hashOf({ view: "responses", id: row.id, tab: "webhooks" })}>Webhooks</a>`,
    ],
  ];
  return html`<div class="page">
    <header class="bar"><h1>Background runs</h1>${active && html`<${Status} status="running" />`}<span class="grow"></span>
      <${SearchBox} params=${route.params} label="Search ids, words, metadata" /><button onClick=${pages.reload}>Refresh</button>
    </header>
    ${overview && html`<${Totals} background=${overview.background} workers=${overview.workers} />`}
    <${Filters} params=${route.params} models=${models} />
    ${error && html`<${Failure} error=${error} />`}
    <${Table}
      label="Background runs"
      pages=${pages}
      columns=${columns}
      empty=${html`<${Empty} title=${status || model || search ? "No background response matches." : "No response runs in the background."}>
        <p class="quiet">Tick “in the background” in the Playground's settings, or send <code>"background": true</code>.</p>
      <//>`}
    />
  </div>`;
}

/** GET /v1/stack/overview, read whenever the rows are; null on a server that has none. */
function useOverview(rows) {
  const [overview, setOverview] = useState(null);
  useEffect(() => {
    const stops = new AbortController();
    get("stack/overview", {}, stops.signal).then(setOverview, () => {});
    return () => stops.abort();
  }, [rows]);
  return overview;
}

function Totals({ background, workers }) {
  const facts = [
    ["running", `${background.running} of ${background.max_running}`],
    ["waiting", `${background.waiting} of ${background.max_waiting}`],
    ...(background.deferred ? [["with a window", background.deferred]] : []),
    ["without a worker", background.orphaned],
    ...(workers ? [["workers", workers.length]] : []),
  ];
  return html`<dl class="totals">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="tabular">${value}</dd></div>`)}</dl>`;
}

/** The place in the queue of a run that waits; the worker of one that runs, and when that was last seen alive. */
function Where({ row, overview }) {
  const run = overview.background.runs.find(({ id }) => id === row.id);
  if (!run || !["queued", "in_progress"].includes(row.status)) return "";
  const worker = overview.workers?.find(({ id }) => id === run.worker);
  const tries = run.attempts > 1 ? ` · worker ${run.attempts} of this run` : "";
  const until = run.expires_at ? ` · begins by ${new Date(run.expires_at * 1000).toLocaleString()}` : "";
  if (run.queue_place !== null && run.queue_place !== undefined) return html`<span class="tabular">place ${run.queue_place}${until}</span>`;
  if (!run.is_leased) return html`<span class="amber">no worker${tries}</span>`;
  return html`<span>${worker ? `${worker.host} · ${worker.pid}` : run.worker || "leased"}
    <span class="quiet small">${worker ? ` seen ${ms(Math.max(0, overview.time - worker.seen_at) * 1000)} ago` : ""}${tries}</span></span>`;
}
