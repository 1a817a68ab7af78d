// Sessions with their state; a first message begins one.

import { apiPath } from "../api.js";
import { count, shortId } from "../format.js";
import { Icon } from "../parts/icons.js";
import { DeleteButton, Empty, Id, Status, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf, setParams } from "../route.js";
import { html, useEffect } from "../vendor/preact.js";
import { erase, read } from "./api.js";
import { SectionBar } from "./section_bar.js";
import { StartSession } from "./start_session.js";

const REFRESH_MS = 3000;
const hrefOf = (id) => hashOf({ view: "agents", id });
/** What a session says of itself in one line: a title in its metadata, or all of that. */
const noteOf = ({ metadata, error }) => error || metadata?.title || (Object.keys(metadata || {}).length ? JSON.stringify(metadata) : "");

const COLUMNS = [
  ["Session", (row) => html`<${Id} id=${row.id} href=${hrefOf(row.id)} />`],
  ["State", (row) => html`<${Status} status=${row.status} />`],
  ["Agent", (row) => html`<span class="clip">${row.agent.name || row.agent.model}</span>`],
  ["Note", (row) => html`<span class="clip quiet">${noteOf(row)}</span>`],
  ["Tokens", (row) => html`<span class="tabular">${row.usage ? html`${count(row.usage.total_tokens)}<span class="unit"> tokens</span>` : ""}</span>`],
  ["Active", (row) => html`<${Time} at=${row.last_active_at} />`],
];

export function SessionList({ route, models }) {
  const { agent } = route.params;
  const pages = usePages("agents/sessions", { agent_id: agent }, read);
  const isActive = (pages.rows || []).some(({ status }) => status === "in_progress");
  useEffect(() => {
    if (!isActive) return undefined;
    const timer = setInterval(() => document.visibilityState === "visible" && pages.reload(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [isActive]);
  const columns = [
    ...COLUMNS,
    [
      "",
      (row) => html`<span class="row actions">${["in_progress", "requires_action"].includes(row.status) ? html`<a class="button" href=${hrefOf(row.id)}>${row.status === "in_progress" ? "Follow" : "Answer"}</a>` : html`<${DeleteButton} what=${shortId(row.id)} onDelete=${() => erase(apiPath`agents/sessions/${row.id}`).then(() => pages.drop(row.id))} />`}</span>`,
    ],
  ];
  return html`<div class="page agents">
    <${SectionBar} current="sessions"><button onClick=${pages.reload}>Refresh</button><//>
    <details class="new" open=${route.tab === "new"}><summary>New session</summary><${StartSession} models=${models} /></details>
    ${agent &&
    html`<p><span class="chip">of ${shortId(agent)}<button type="button" class="plain" aria-label="Of all agents" onClick=${() => setParams({ agent: "" })}><${Icon} name="close" /></button></span></p>`}
    <${Table} label="Sessions" pages=${pages} columns=${columns} empty=${html`<${Empty} title=${agent ? "This agent has no session." : "There is no session yet."} />`} />
  </div>`;
}
