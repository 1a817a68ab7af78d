// The frame of a chart: a scale from zero, three lines, the first and the last time. Its colours are the theme's.

import { html } from "../vendor/preact.js";

const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 2 });

/** The least round number that is no less than `value`; half of it is round too. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= value);
}

/** `children` are SVG shapes in `width` by 100, where 0 is at 100 and `top` at 0; `more` are attributes of the box. */
export const Plot = ({ top, width, from, to, children, more }) =>
  html`<div class="plot" ...${more}>
      <svg viewBox="0 0 ${width} 100" preserveAspectRatio="none" aria-hidden="true">${children}</svg>
      <span class="top">${short.format(top)}</span><span class="middle">${short.format(top / 2)}</span><span class="zero">0</span>
    </div>
    <div class="dates quiet small"><span>${from}</span><span>${to}</span></div>`;
