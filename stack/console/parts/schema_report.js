// The live check against the Open Responses schema: a count, each violation with its rule, and the final object.

import { count } from "../format.js";
import { Conformance, checkResponse, loadSchema } from "../schema/open_responses.js";
import { html, useEffect, useMemo, useReducer, useRef, useState } from "../vendor/preact.js";
import { Empty, Failure } from "./states.js";

const ENDED = new Set(["completed", "failed", "incomplete", "cancelled"]);

/** Check `rows` and the final `response`: {spec, error, valid, outside, bad, pending, final}. */
export function useConformance(rows, response) {
  const [spec, setSpec] = useState(null);
  const [error, setError] = useState(null);
  const [, goOn] = useReducer((turn) => turn + 1, 0);
  const checker = useRef(null);
  checker.current ||= new Conformance();
  useEffect(() => void loadSchema().then(setSpec, setError), []);
  const pending = spec ? checker.current.advance(spec, rows) : rows.length;
  useEffect(() => {
    if (!spec || !pending) return undefined;
    const timer = setTimeout(goOn, 0);
    return () => clearTimeout(timer);
  });
  const final = useMemo(() => (spec && response && ENDED.has(response.status) ? checkResponse(spec, response) : null), [spec, response]);
  const { valid, outside, bad } = checker.current;
  return { spec, error, valid, outside, bad, pending, final };
}

/** The name of the tab: ✓ where all that was checked is valid, the number of violations where it is not. */
export function schemaLabel({ spec, bad, final, valid, outside }) {
  const broken = bad.size + (final?.found.length ? 1 : 0);
  if (!spec || !(valid + outside + broken || final)) return "Schema";
  return broken ? `Schema ✕ ${broken}` : "Schema ✓";
}

const Violation = ({ path, rule, message }) =>
  html`<li><code>${path || "/"}</code> ${message} <span class="rule">${rule}</span></li>`;

const Outside = ({ paths }) =>
  html`<p class="quiet small">Not in the schema, so not checked: ${[...new Set(paths)].slice(0, 12).map((path) => html`<code key=${path}>${path}</code> `)}</p>`;

export function SchemaReport({ check, onEvent }) {
  const { spec, error, valid, outside, bad, pending, final } = check;
  if (error) return html`<${Failure} error=${error} />`;
  if (!spec || !(valid + outside + bad.size || final)) return html`<${Empty} title="Each event is held against the Open Responses schema as it comes." />`;
  return html`<div class="schema-report">
    <p><b>Open Responses ${spec.version}</b></p>
    <dl class="counts">
      <div><dt>valid</dt><dd class="tabular">${count(valid)}</dd></div>
      <div class=${bad.size ? "bad" : ""}><dt>violations</dt><dd class="tabular">${count(bad.size)}</dd></div>
      <div><dt>outside</dt><dd class="tabular">${count(outside)}</dd></div>
      ${pending > 0 && html`<div><dt>to check</dt><dd class="tabular">${count(pending)}</dd></div>`}
    </dl>
    ${[...bad].slice(0, 100).map(
      ([event, result]) => html`<section key=${event.sequence_number}>
        <h2><button type="button" class="plain mono" onClick=${() => onEvent(event)}>${event.sequence_number} ${event.type}</button></h2>
        <ul class="violations">${result.found.map((each) => html`<${Violation} key=${each.path + each.rule} ...${each} />`)}</ul>
      </section>`,
    )}
    ${final &&
    html`<section>
      <h2>Final response ${final.found.length ? "" : html`<span class="good">✓ valid</span>`}</h2>
      ${final.found.length > 0 && html`<ul class="violations">${final.found.map((each) => html`<${Violation} key=${each.path + each.rule} ...${each} />`)}</ul>`}
      ${final.outside.length > 0 && html`<${Outside} paths=${final.outside} />`}
    </section>`}
    <p class="quiet small">“Outside” is what OpenAI's API has and the schema does not: hosted tools, their items and events. Names that differ by dialect count as the schema's.</p>
  </div>`;
}

/** The violations of one event, shown above its JSON. */
export const EventViolations = ({ result }) =>
  html`<ul class="violations">${result.found.map((each) => html`<${Violation} key=${each.path + each.rule} ...${each} />`)}</ul>`;
