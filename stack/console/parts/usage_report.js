// Usage of a range as a chart and a table of sums, which say the same.

import { count } from "../format.js";
import { hashOf, parseHash, setParams } from "../route.js";
import { MEASURES, MOST_GROUPS, RANGES, queryOf, sumByGroup } from "../usage.js";
import { html, useEffect, useMemo, useState } from "../vendor/preact.js";
import { BarChart } from "./bar_chart.js";
import { Empty, Failure, Skeleton } from "./states.js";

export const rangeOf = (params) => (RANGES.some(([name]) => name === params.range) ? params.range : RANGES[1][0]);

/** Load the buckets of a range: [buckets, error, reload]. `load(query)` returns a promise of a page. */
export function useBuckets(load, range, dependencies) {
  const [state, setState] = useState([null, null]);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    let isWanted = true;
    setState([null, null]);
    load(queryOf(range)).then(
      (page) => isWanted && setState([page.data, null]),
      (error) => isWanted && setState([null, error]),
    );
    return () => (isWanted = false);
  }, [range, turn, ...dependencies]);
  return [...state, () => setTurn(turn + 1)];
}

/** The choices of a report: [name of the parameter, label, [[value, text]]] each. */
export const Choices = ({ params, choices }) =>
  html`<div class="row tools choices">
    ${choices.map(
      ([name, label, options]) => html`<label key=${name}>${label}
        <select value=${params[name] || options[0][0]} onChange=${(event) => setParams({ [name]: event.target.value === options[0][0] ? "" : event.target.value })}>
          ${options.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}
        </select></label>`,
    )}
  </div>`;

export const RANGE_CHOICE = ["range", "Range", [RANGES[1], RANGES[0], RANGES[2]].map(([name]) => [name, `last ${name}`])];
export const MEASURE_CHOICE = ["measure", "Show", MEASURES.map(([name]) => [name, name])];

/** `groupOf` is the id of a result's group, `nameOf(id)` its name; `head` the heading of the groups' column. */
export function UsageReport({ buckets, error, onRetry, params, groupOf, nameOf, head }) {
  const sums = useMemo(() => buckets && sumByGroup(buckets, groupOf), [buckets, head]);
  if (error) return error.code === "not_configured" ? html`<${Empty} title=${error.message} />` : html`<${Failure} error=${error} onRetry=${onRetry} />`;
  if (!sums) return html`<${Skeleton} />`;
  const measure = MEASURES.some(([name]) => name === params.measure) ? params.measure : MEASURES[0][0];
  const range = rangeOf(params);
  if (!sums.groups.length)
    return html`<${Empty} title="Nothing was used in the last ${range}.">
      <p class="quiet">Requests are counted when they end. Those that failed, and background responses, are not.</p>
      ${range !== "30 days" && html`<a class="button" href=${hashOf({ ...parseHash(), params: { ...params, range: "30 days" } })}>Show 30 days</a>`}
    <//>`;
  const isHourly = queryOf(range).bucket_width === "1h";
  const timeOf = (at) => new Date(at * 1000).toLocaleString(undefined, isHourly ? { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" } : { month: "short", day: "numeric", timeZone: "UTC" });
  return html`<${BarChart} label="${measure} of the last ${range}" unit=${measure} times=${sums.times} series=${seriesOf(sums.groups, measure, nameOf)} timeOf=${timeOf} />
    <${Sums} groups=${sums.groups} nameOf=${nameOf} head=${head} />`;
}

/** The largest groups by the measure; all further ones are one series. */
function seriesOf(groups, measure, nameOf) {
  const used = groups.filter(({ sums }) => sums[measure] > 0).sort((one, other) => other.sums[measure] - one.sums[measure]);
  const own = used.slice(0, MOST_GROUPS).map(({ id, values }) => ({ name: nameOf(id), values: values[measure] }));
  const others = used.slice(MOST_GROUPS);
  if (!others.length) return own;
  return [...own, { name: `${others.length} others`, values: own[0].values.map((_, index) => others.reduce((sum, { values }) => sum + values[measure][index], 0)) }];
}

function Sums({ groups, nameOf, head }) {
  const totals = Object.fromEntries(MEASURES.map(([name]) => [name, groups.reduce((sum, group) => sum + group.sums[name], 0)]));
  const row = (name, sums) => html`<td data-label=${head}><span class="clip">${name}</span></td>
    ${MEASURES.map(([measure]) => html`<td key=${measure} data-label=${measure} class="number tabular"><span class="unit quiet">${measure} </span>${count(sums[measure])}</td>`)}`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of sums"><table class="list sums" aria-label="Sums">
    <thead><tr><th scope="col">${head}</th>${MEASURES.map(([measure]) => html`<th key=${measure} scope="col" class="number">${measure}</th>`)}</tr></thead>
    <tbody>${groups.map((group) => html`<tr key=${group.id}>${row(nameOf(group.id), group.sums)}</tr>`)}</tbody>
    ${groups.length > 1 && html`<tfoot><tr>${row("All", totals)}</tr></tfoot>`}
  </table></div>`;
}
