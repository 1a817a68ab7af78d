// The deliveries of a response's end to webhooks, each with its tries.

import { apiPath, get } from "../api.js";
import { ms } from "../format.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { Empty, Failure, Id, Skeleton, Status, Time } from "./states.js";

const REFRESH_MS = 3000;

export function Deliveries({ id, ended }) {
  const [page, setPage] = useState(null);
  const [error, setError] = useState(null);
  const load = () => get(apiPath`responses/${id}/webhook_deliveries`).then(setPage, setError);
  useEffect(() => void load(), [id, ended]);
  const waits = (page?.data || []).some((delivery) => delivery.status === "pending");
  useEffect(() => {
    if (!waits) return undefined;
    const timer = setInterval(() => document.visibilityState === "visible" && load(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [waits, id]);
  if (error) return html`<${Failure} error=${error} onRetry=${() => (setError(null), load())} />`;
  if (!page) return html`<${Skeleton} rows=${3} />`;
  if (!page.data.length)
    return html`<${Empty} title=${ended ? "No webhook is called for this response." : "Webhooks are called when the response ends."}>
      <p class="quiet">Webhooks are set in the run config, in <code>webhooks.receivers</code>.</p>
    <//>`;
  return html`${page.data.map((delivery) => html`<${Delivery} key=${delivery.id} delivery=${delivery} />`)}`;
}

const WORDS = { pending: "queued", delivered: "completed", failed: "failed" };

function Delivery({ delivery }) {
  return html`<section class="delivery">
    <header class="row wrap">
      <b>${delivery.host}</b><code>${delivery.event}</code><${Status} status=${WORDS[delivery.status]} word=${delivery.status} />
      <span class="grow"></span><${Id} id=${delivery.id} />
    </header>
    ${delivery.attempts.length === 0
      ? html`<p class="quiet small">No try yet.</p>`
      : html`<div class="scroll"><table class="list" aria-label="Tries of ${delivery.host}">
          <thead><tr><th scope="col">Try</th><th scope="col">Result</th><th scope="col">Took</th><th scope="col">At</th></tr></thead>
          <tbody>
            ${delivery.attempts.map(
              (attempt, index) => html`<tr key=${index}>
                <td class="tabular">${delivery.attempt_count - delivery.attempts.length + index + 1}</td>
                <td class=${attempt.status_code >= 200 && attempt.status_code < 300 ? "" : "bad"}>${attempt.status_code ?? attempt.error}</td>
                <td class="tabular">${ms(attempt.duration_ms)}</td>
                <td><${Time} at=${attempt.created_at} /></td>
              </tr>`,
            )}
          </tbody>
        </table></div>`}
    ${delivery.next_attempt_at && html`<p class="quiet small">Next try: <${Time} at=${delivery.next_attempt_at} /></p>`}
  </section>`;
}
