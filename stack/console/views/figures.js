// Figures: live charts of this server, from /metrics.

import { call } from "../api.js";
import { count } from "../format.js";
import { Plot, roundUp } from "../parts/plot.js";
import { Empty, Failure } from "../parts/states.js";
import { html, useEffect, useState } from "../vendor/preact.js";

const EVERY_MS = 2000;
const MOST_POINTS = 300;

/** Parse Prometheus' text: [{name, labels, value}]. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([a-z_:][\w:]*)(?:\{([^}]*)\})? (\S+)/i.exec(line);
    if (match) samples.push({ name: match[1], labels: match[2] || "", value: Number(match[3]) });
  }
  return samples;
}

const isOf = (name, part = "") => (sample) => sample.name === name && sample.labels.includes(part);
const failed = (sample) => sample.name === "stack_requests_total" && /status="[45]/.test(sample.labels);

/** [title, unit, which samples are summed, true for a rate]. */
const CHARTS = [
  ["Requests", "per second", isOf("stack_requests_total"), true],
  ["Failed requests", "per second", failed, true],
  ["Requests in flight", "", isOf("stack_requests_in_flight"), false],
  ["Open streams", "", isOf("stack_streams_open"), false],
  ["Output tokens", "per second", isOf("stack_tokens_total", 'kind="output"'), true],
  ["Input tokens", "per second", isOf("stack_tokens_total", 'kind="input"'), true],
  ["Input tokens from the cache", "per second", isOf("stack_tokens_total", 'kind="cached"'), true],
  ["Reasoning tokens", "per second", isOf("stack_tokens_total", 'kind="reasoning"'), true],
];

const sum = (samples, test) => samples.reduce((total, sample) => (test(sample) ? total + sample.value : total), 0);

export function Figures() {
  const [points, setPoints] = useState([]);
  const [error, setError] = useState(null);
  useEffect(() => {
    let stopped = false;
    const load = async () => {
      try {
        const samples = parseMetrics(await call("GET", "../metrics"));
        const sums = CHARTS.map(([, , test]) => sum(samples, test));
        if (!stopped) setPoints((all) => [...all.slice(1 - MOST_POINTS), { at: Date.now() / 1000, sums }]);
        setError(null);
      } catch (failure) {
        if (!stopped) setError(failure);
      }
    };
    load();
    const timer = setInterval(() => document.visibilityState === "visible" && load(), EVERY_MS);
    return () => {
      stopped = true;
      clearInterval(timer);
    };
  }, []);
  return html`<div class="page">
    <header class="bar"><h1>Figures</h1><span class="quiet">of all workers of this server, every ${EVERY_MS / 1000} s</span></header>
    ${error && html`<${Failure} error=${error} />`}
    ${!error && points.length < 2 && html`<${Empty} title="The first figures come in a moment." />`}
    <div class="charts">
      ${points.length > 1 &&
      CHARTS.map(([title, unit, , isRate], index) => html`<${Chart} key=${title} title=${title} unit=${unit} values=${series(points, index, isRate)} />`)}
    </div>
  </div>`;
}

function series(points, chart, isRate) {
  const times = points.map((point) => point.at);
  const values = points.map((point) => point.sums[chart]);
  if (!isRate) return [times, values];
  return [times.slice(1), values.slice(1).map((value, index) => Math.max(0, value - values[index]) / (times[index + 1] - times[index]))];
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString();

/** A line over what it fills; its values are read out by its caption, which is the latest of them. */
function Chart({ title, unit, values: [times, values] }) {
  const now = values.at(-1) ?? 0;
  const top = roundUp(Math.max(1, ...values));
  const span = times.at(-1) - times[0] || 1;
  const points = values.map((value, index) => `${((100 * (times[index] - times[0])) / span).toFixed(2)},${(100 - (100 * value) / top).toFixed(2)}`).join(" ");
  return html`<figure class="chart">
    <figcaption><span>${title}</span> <b class="tabular">${count(Math.round(now * 10) / 10)}</b> <span class="quiet">${unit}</span></figcaption>
    <div aria-hidden="true"><${Plot} top=${top} width=${100} from=${clock(times[0])} to=${clock(times.at(-1))}>
      <polygon points="0,100 ${points} 100,100" /><polyline points=${points} />
    <//></div>
  </figure>`;
}
