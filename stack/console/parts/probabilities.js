// The answer to one question of a decision: what is likeliest, and a bar for each option.

import { barsOf } from "../decisions.js";
import { html, useState } from "../vendor/preact.js";

const MOST_BARS = 12;

export const percent = (share) => (share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);

/** `isStale` says that the question has changed since it was answered. */
export function Probabilities({ question, answer, isStale }) {
  const [showsAll, setShowsAll] = useState(false);
  if (answer.type === "refusal") return html`<p class="refusal">The model refused this question.</p>`;
  const { bars, likeliest } = barsOf(question, answer);
  const rows = bars.map(([text, share], index) => ({ text, share, index }));
  // of many options the likeliest are shown first; the levels of a score stay in their order
  const shown = showsAll || rows.length <= MOST_BARS ? rows : rows.toSorted((one, other) => other.share - one.share).slice(0, MOST_BARS);
  return html`<div class=${isStale ? "stale" : ""}>
    <p class="verdict"><${Verdict} answer=${answer} last=${bars.length - 1} />${isStale && html` <span class="quiet small">before the last change</span>`}</p>
    <ol class="probabilities">
      ${shown.map(
        ({ text, share, index }) => html`<li key=${index} class=${index === likeliest ? "on" : ""}>
          <span class="clip" title=${text}>${text}</span>
          <svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true"><rect width=${100 * share} height="1" /></svg>
          <span class="tabular">${percent(share)}</span>
        </li>`,
      )}
    </ol>
    ${rows.length > shown.length && html`<button type="button" class="plain" onClick=${() => setShowsAll(true)}>Show all ${rows.length}</button>`}
  </div>`;
}

function Verdict({ answer, last }) {
  if (answer.type === "predicate") return html`<b>${percent(answer.probability)}</b> <span class="quiet">true</span>`;
  const confidence = html`<span class="quiet small">confidence ${answer.confidence.toFixed(2)}</span>`;
  if (answer.type === "choice") return html`<b>${String(answer.choice)}</b> ${confidence}`;
  return html`<b class="tabular">${answer.score.toFixed(2)}</b> <span class="quiet">of 0 to ${last}</span> ${confidence}`;
}
