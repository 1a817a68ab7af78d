// Spans that an agent recorded about its own run, as a waterfall: nested, with times, errors and details on demand.

import { ms } from "../format.js";
import { hashOf } from "../route.js";
import { html, useState } from "../vendor/preact.js";
import { JsonTree } from "./json_tree.js";
import { Empty } from "./states.js";

const MOST_ROWS = 300;

/** Return the spans as rows in the order of their tree: {span, depth, start, end} in ms since the first start. */
export function rowsOf(spans) {
  const ids = new Set(spans.map((span) => span.id));
  const children = new Map();
  for (const span of spans) {
    const parent = ids.has(span.parent_id) && span.parent_id !== span.id ? span.parent_id : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(span);
  }
  const at = (time) => (time ? Date.parse(time) : NaN);
  const origin = Math.min(...spans.map((span) => at(span.started_at)).filter((time) => !Number.isNaN(time)));
  const rows = [];
  const seen = new Set();
  const pending = [...(children.get(null) || [])].reverse().map((span) => [span, 0]);
  const walk = () => {
    while (pending.length) {
      const [span, depth] = pending.pop();
      if (seen.has(span.id)) continue;
      seen.add(span.id);
      const start = at(span.started_at) - origin || 0;
      rows.push({ span, depth, start, end: Math.max(start, at(span.ended_at) - origin || start) });
      for (const child of [...(children.get(span.id) || [])].reverse()) pending.push([child, depth + 1]);
    }
  };
  walk();
  // spans that are each other's parents have no root: they are shown all the same
  for (const span of spans) {
    if (!seen.has(span.id)) pending.push([span, 0]);
    walk();
  }
  return rows;
}

/** Return the words that name a span. */
export function nameOf(span) {
  const data = span.span_data;
  const text = (value) => (typeof value === "string" ? value : "");
  switch (data.type) {
    case "handoff":
      return `handoff ${text(data.from_agent)} → ${text(data.to_agent)}`;
    case "response":
      return "response";
    case "generation":
      return `generation ${text(data.model)}`;
    case "mcp_tools":
      return `tools of ${text(data.server)}`;
    case "custom":
      return text(data.name) || "custom";
    default:
      return `${data.type} ${text(data.name)}`;
  }
}

export function AgentSpans({ spans, responseId }) {
  const [opened, setOpened] = useState(null);
  const [most, setMost] = useState(MOST_ROWS);
  if (!spans.length) return html`<${Empty} title="No span of this trace is stored yet: agents send them when they end." />`;
  const rows = rowsOf(spans);
  const total = Math.max(...rows.map((row) => row.end), 1);
  return html`<div class="waterfall agent-spans" role="list" aria-label="Agents' spans over time">
    ${rows.slice(0, most).map((row) => {
      const { span } = row;
      const on = opened === span.id;
      const own = responseId && span.span_data.response_id === responseId;
      return html`<div role="listitem" key=${span.id}>
        <button type="button" class="span plain ${own ? "own" : ""}" aria-expanded=${on} onClick=${() => setOpened(on ? null : span.id)}>
          <span class="clip">${"\u00a0\u00a0".repeat(Math.min(row.depth, 12))}${nameOf(span)}${span.error && html` <b class="bad" title=${span.error.message}>failed</b>`}</span>
          <svg viewBox="0 0 1000 12" preserveAspectRatio="none" aria-hidden="true">
            <rect class="${span.span_data.type} ${span.error ? "error" : ""}" x=${(1000 * row.start) / total} y="2" width=${Math.max(2, (1000 * (row.end - row.start)) / total)} height="8" rx="2" />
          </svg>
          <span class="tabular quiet">${span.ended_at ? ms(row.end - row.start) : "open"}</span>
        </button>
        ${on && html`<${Details} span=${span} />`}
      </div>`;
    })}
    ${rows.length > most && html`<button class="more" onClick=${() => setMost(most + 1000)}>${rows.length - most} more spans</button>`}
    <div class="span axis"><span></span><span class="row"><span>0</span><span class="grow"></span><span>${ms(total)}</span></span><span></span></div>
  </div>`;
}

function Details({ span }) {
  const { response_id: responseId, type } = span.span_data;
  return html`<div class="span-details">
    ${span.error && html`<p class="bad">${span.error.message}</p>`}
    ${type === "response" && responseId && html`<p><a href=${hashOf({ view: "responses", id: responseId, tab: "trace" })}>Open the response ${responseId}</a></p>`}
    <${JsonTree} value=${span} open=${3} />
  </div>`;
}
