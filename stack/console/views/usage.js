// Usage: what this key may do, its limits, and what it has used.

import { get } from "../api.js";
import { BOUNDS, subjectName, textOf } from "../limits.js";
import { Empty, Id, Time } from "../parts/states.js";
import { Choices, MEASURE_CHOICE, RANGE_CHOICE, UsageReport, rangeOf, useBuckets } from "../parts/usage_report.js";
import { html } from "../vendor/preact.js";

export function Usage({ route, access }) {
  const { params } = route;
  const [buckets, error, reload] = useBuckets((query) => get("stack/usage", { ...query, group_by: ["model"] }), rangeOf(params), []);
  return html`<div class="page">
    <header class="bar"><h1>Usage</h1><span class="quiet">of the key that this page uses</span><span class="grow"></span><button onClick=${reload}>Refresh</button></header>
    ${access.id && html`<${KeyFacts} access=${access} />`}
    <${Choices} params=${params} choices=${[RANGE_CHOICE, MEASURE_CHOICE]} />
    <${UsageReport} buckets=${buckets} error=${error} onRetry=${reload} params=${params} groupOf=${(row) => row.model} nameOf=${(id) => id || "unknown"} head="Model" />
    ${access.id && html`<h2>Limits</h2><${OwnLimits} limits=${access.limits} own=${access.id} />`}
  </div>`;
}

function KeyFacts({ access }) {
  const facts = [
    ["Project", html`<${Id} id=${access.project_id} />`],
    ["Rights", access.scopes.join(", ")],
    ["Models", access.models ? access.models.join(", ") : "any"],
    ["Tools", access.tools ? access.tools.join(", ") : "any"],
    ["Expires", access.expires_at ? html`<${Time} at=${access.expires_at} />` : "never"],
  ];
  return html`<dl class="key-facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** The bounds of each limit that applies, in words: limits are few, and most of their bounds are not set. */
function OwnLimits({ limits, own }) {
  const rows = limits.flatMap((limit) => BOUNDS.filter((bound) => textOf(limit, bound)).map((bound) => [limit.model, ...bound, textOf(limit, bound)]));
  if (!rows.length) return html`<${Empty} title="This key has no limits." />`;
  return html`<table class="list own-limits" aria-label="Limits">
    <thead><tr><th scope="col">Of</th><th scope="col">At most</th></tr></thead>
    <tbody>${rows.map(([subject, field, what, time, , text]) => html`<tr key=${subject + field}><td>${subjectName(subject, { [own]: "This key" })}</td><td class="tabular">${text} ${what} ${time}</td></tr>`)}</tbody>
  </table>`;
}
