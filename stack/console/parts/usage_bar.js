// What a response used: input (cached part), reasoning, output as one bar in proportion, and its speed.

import { count, ms } from "../format.js";
import { html } from "../vendor/preact.js";

export function UsageBar({ usage, firstMs, totalMs }) {
  if (!usage) return null;
  const cached = usage.input_tokens_details?.cached_tokens || 0;
  const reasoning = usage.output_tokens_details?.reasoning_tokens || 0;
  const parts = [
    ["cached", cached],
    ["input", usage.input_tokens - cached],
    ["reasoning", reasoning],
    ["output", usage.output_tokens - reasoning],
  ];
  const seconds = totalMs && firstMs !== undefined ? (totalMs - firstMs) / 1000 : 0;
  return html`<div class="usage">
    <svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">${bars(parts, usage.total_tokens || 1)}</svg>
    <div class="small tabular">
      <span class="swatch input">${count(usage.input_tokens)} in${cached ? html` <span class="quiet">(${count(cached)} cached)</span>` : ""}</span>
      ${reasoning ? html`<span class="swatch reasoning">${count(reasoning)} reasoning</span>` : ""}
      <span class="swatch output">${count(usage.output_tokens - reasoning)} out</span>
      ${firstMs !== undefined && html`<span>${ms(firstMs)} to the first token</span>`}
      ${seconds > 0.05 && usage.output_tokens > 1 && html`<span>${(usage.output_tokens / seconds).toFixed(seconds > 10 ? 0 : 1)} tok/s</span>`}
      ${totalMs ? html`<span>${ms(totalMs)}</span>` : ""}
    </div>
  </div>`;
}

function bars(parts, total) {
  let x = 0;
  return parts.map(([name, tokens]) => {
    const width = (100 * Math.max(0, tokens)) / total;
    const bar = html`<rect key=${name} class=${name} x=${x} y="0" width=${width} height="1" />`;
    x += width;
    return bar;
  });
}
