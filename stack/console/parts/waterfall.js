// The items of a response over time. Times come from the stream; a stored response without events has none.

import { ms } from "../format.js";
import { html } from "../vendor/preact.js";
import { Empty } from "./states.js";

/** Return [{name, kind, start, end}] in ms since the request, from a run that was streamed or replayed. */
export function spansOf(state, run) {
  if (!run) return [];
  return state.items
    .map((item, index) => ({ item, meta: state.meta[index] }))
    .filter(({ item, meta }) => item && meta?.startedAt !== undefined)
    .map(({ item, meta }) => ({
      name: item.name || item.action?.query || item.type.replace(/_/g, " "),
      kind: item.type,
      start: meta.startedAt - run.startedAt,
      end: (meta.endedAt ?? performance.now()) - run.startedAt,
    }));
}

export function Waterfall({ spans }) {
  if (!spans.length) return html`<${Empty} title="A trace is drawn from events: of responses that ran in the background, or that were streamed here." />`;
  const total = Math.max(...spans.map((span) => span.end), 1);
  return html`<div class="waterfall" role="img" aria-label="Items over time">
    ${spans.map(
      (span, index) => html`<div class="span" key=${index}>
        <span class="clip">${span.name}</span>
        <svg viewBox="0 0 1000 12" preserveAspectRatio="none" aria-hidden="true">
          <rect class=${span.kind} x=${(1000 * span.start) / total} y="2" width=${Math.max(2, (1000 * (span.end - span.start)) / total)} height="8" rx="2" />
        </svg>
        <span class="tabular quiet">${ms(span.end - span.start)}</span>
      </div>`,
    )}
    <div class="span axis"><span></span><span class="row"><span>0</span><span class="grow"></span><span>${ms(total)}</span></span><span></span></div>
  </div>`;
}
