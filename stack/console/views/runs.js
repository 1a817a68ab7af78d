// Background responses: what waits, what runs, follow and cancel.

import { cancelResponse } from "../api.js";
import { Empty, Failure, Status } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf } from "../route.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { Filters, responseColumns } from "./responses.js";

const REFRESH_MS = 3000;

export function Runs({ route, models }) {
  const { status, model } = route.params;
  const pages = usePages("responses", { background: true, status, model });
  const [error, setError] = useState(null);
  const active = (pages.rows || []).some((row) => ["queued", "in_progress"].includes(row.status));
  useEffect(() => {
    if (!active) return undefined;
    const timer = setInterval(() => document.visibilityState === "visible" && pages.reload(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [active]);
  const cancel = (row) => cancelResponse(row.id).then(pages.reload, setError);
  const columns = [
    ...responseColumns,
    [
      "",
      (row) =>
        ["queued", "in_progress"].includes(row.status)
          ? html`<span class="row"><a class="button" href=${hashOf({ view: "responses", id: row.id })}>Follow</a><button onClick=${() => cancel(row)}>Cancel</button></span>`
          : "",
    ],
  ];
  return html`<div class="page">
    <header class="bar"><h1>Background runs</h1>${active && html`<${Status} status="running" />`}<span class="grow"></span><button onClick=${pages.reload}>Refresh</button></header>
    <${Filters} params=${route.params} models=${models} />
    ${error && html`<${Failure} error=${error} />`}
    <${Table}
      label="Background runs"
      pages=${pages}
      columns=${columns}
      empty=${html`<${Empty} title="No response runs in the background.">
        <p class="quiet">Tick “in the background” in the Playground's settings, or send <code>"background": true</code>.</p>
      <//>`}
    />
  </div>`;
}
