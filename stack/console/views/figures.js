// Figures: live charts of this server, from /metrics.

import { call } from "../api.js";
import { count } from "../format.js";
import { Empty, Failure } from "../parts/states.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";

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
  const theme = useTheme();
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
      CHARTS.map(([title, unit, , isRate], index) => html`<${Chart} key=${`${title} ${theme}`} title=${title} unit=${unit} values=${series(points, index, isRate)} />`)}
    </div>
  </div>`;
}

/** The theme now; charts are redrawn when it changes. */
function useTheme() {
  const dark = () => getComputedStyle(document.documentElement).getPropertyValue("color-scheme") + matchMedia("(prefers-color-scheme: dark)").matches;
  const [theme, setTheme] = useState(dark);
  useEffect(() => {
    const changed = () => setTheme(dark());
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", changed);
    addEventListener("stack:theme", changed);
    return () => {
      media.removeEventListener("change", changed);
      removeEventListener("stack:theme", changed);
    };
  }, []);
  return theme;
}

const clock = (_, times) => times.map((at) => new Date(at * 1000).toLocaleTimeString());

function series(points, chart, isRate) {
  const times = points.map((point) => point.at);
  const values = points.map((point) => point.sums[chart]);
  if (!isRate) return [times, values];
  return [times.slice(1), values.slice(1).map((value, index) => Math.max(0, value - values[index]) / (times[index + 1] - times[index]))];
}

function Chart({ title, unit, values }) {
  const box = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    // a canvas needs the colour itself, not the variable
    const colour = (name) => {
      box.current.style.color = `var(${name})`;
      return getComputedStyle(box.current).color;
    };
    plot.current = new globalThis.uPlot(
      {
        width: box.current.clientWidth,
        height: 140,
        cursor: { show: false },
        legend: { show: false },
        axes: [
          { stroke: colour("--quiet"), grid: { show: false }, ticks: { show: false }, values: clock, space: 90 },
          { stroke: colour("--quiet"), grid: { stroke: colour("--line") }, ticks: { show: false }, size: 44 },
        ],
        scales: { y: { range: (_, __, top) => [0, Math.max(1, top * 1.1)] } },
        series: [{}, { stroke: colour("--accent"), width: 1.5, fill: colour("--accent-soft"), points: { show: false } }],
      },
      values,
      box.current,
    );
    const observer = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: 140 }));
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(values), [values]);
  const now = values[1].at(-1) ?? 0;
  return html`<figure class="chart">
    <figcaption><span>${title}</span> <b class="tabular">${count(Math.round(now * 10) / 10)}</b> <span class="quiet">${unit}</span></figcaption>
    <div ref=${box} aria-hidden="true"></div>
  </figure>`;
}
