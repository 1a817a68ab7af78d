// Bars of time, stacked by group; what the pointer or an arrow key is on is read out below.

import { count } from "../format.js";
import { html, useState } from "../vendor/preact.js";
import { Plot, roundUp } from "./plot.js";

/** `series` are [{name, values}] of as many values as there are `times` (Unix, s); `timeOf` renders one of them. */
export function BarChart({ label, unit, times, series, timeOf }) {
  const [at, setAt] = useState(null);
  const totals = times.map((_, index) => series.reduce((sum, { values }) => sum + values[index], 0));
  const top = roundUp(Math.max(1, ...totals));
  const moved = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    setAt(Math.min(times.length - 1, Math.max(0, (at ?? (by > 0 ? -1 : times.length)) + by)));
  };
  const pointed = (event) => {
    const drawn = event.currentTarget.firstElementChild.getBoundingClientRect();
    setAt(Math.min(times.length - 1, Math.max(0, Math.floor((times.length * (event.clientX - drawn.left)) / drawn.width))));
  };
  const sum = totals.reduce((all, value) => all + value, 0);
  const box = {
    tabindex: 0,
    role: "img",
    "aria-label": `${label}: ${count(sum)} ${unit}. Arrow keys read single bars.`,
    onKeyDown: moved,
    onPointerMove: pointed,
    onPointerLeave: () => setAt(null),
    onBlur: () => setAt(null),
  };
  return html`<figure class="bar-chart">
    <${Plot} top=${top} width=${times.length} from=${timeOf(times[0])} to=${timeOf(times.at(-1))} more=${box}>
      ${at !== null && html`<rect class="cursor" x=${at} y="0" width="1" height="100" />`}
      ${times.map((_, index) => bars(series, index, top))}
    <//>
    <figcaption class="small" aria-live="polite">
      ${at === null
        ? series.map(({ name }, index) => html`<span key=${name} class="series s${index}">${name}</span>`)
        : html`<b>${timeOf(times[at])}</b><span class="tabular">${count(totals[at])} ${unit}</span>
            ${series.map(({ name, values }, index) => values[at] > 0 && html`<span key=${name} class="series s${index} tabular">${name} ${count(values[at])}</span>`)}`}
    </figcaption>
  </figure>`;
}

function bars(series, index, top) {
  let y = 100;
  return series.map(({ name, values }, place) => {
    const height = (100 * values[index]) / top;
    y -= height;
    return height > 0 && html`<rect key=${name} class="s${place}" x=${index + 0.1} y=${y} width="0.8" height=${height} />`;
  });
}
