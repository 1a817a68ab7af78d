// The items of a response over time. Times come from the stream; a stored response without events has none.

import { count, ms } from "../format.js";
import { html } from "../vendor/preact.js";
import { Empty } from "./states.js";

/** Return {spans: [{name, kind, start, end}], unit}: ms since the request of a run that was followed live, the numbers
 * of events of one that is replayed, whose events carry no times. */
export function spansOf(state, run) {
  if (!run) return { spans: [], unit: "ms" };
  const unit = run.isReplay ? "events" : "ms";
  const spans = state.items
    .map((item, index) => ({ item, meta: state.meta[index] }))
    .filter(({ item, meta }) => item && meta?.first !== undefined)
    .map(({ item, meta }) => ({
      name: item.name || item.action?.query || item.type.replace(/_/g, " "),
      kind: item.type,
      start: run.isReplay ? meta.first : meta.startedAt - run.startedAt,
      end: run.isReplay ? (meta.last ?? state.lastNumber) : (meta.endedAt ?? performance.now()) - run.startedAt,
    }));
  return { spans, unit };
}

export function Waterfall({ spans, unit }) {
  if (!spans.length) return html`<${Empty} title="A trace is drawn from events: of responses that ran in the background, or that were streamed here." />`;
  const total = Math.max(...spans.map((span) => span.end), 1);
  const size = (value) => (unit === "ms" ? ms(value) : `${count(value)} ${value === 1 ? "event" : "events"}`);
  return html`${unit === "events" && html`<p class="quiet small">Stored events carry no times: this is their order. Follow a response while it runs to see how long each item takes.</p>`}
    <div class="waterfall" role="img" aria-label="Items over time">
      ${spans.map(
        (span, index) => html`<div class="span" key=${index}>
          <span class="clip" title=${span.name}>${span.name}</span>
          <svg viewBox="0 0 1000 12" preserveAspectRatio="none" aria-hidden="true">
            <rect class=${span.kind} x=${Math.min(995, (1000 * span.start) / total)} y="2" width=${Math.max(5, (1000 * (span.end - span.start)) / total)} height="8" />
          </svg>
          <span class="tabular quiet">${size(span.end - span.start)}</span>
        </div>`,
      )}
      <div class="span axis"><span></span><span class="row"><span>0</span><span class="grow"></span><span>${size(total)}</span></span><span></span></div>
    </div>`;
}
