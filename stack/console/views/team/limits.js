// The limits of a project: of all of it, of its keys, of its models. Each row is saved by itself, and each field below.

import { apiPath, getAll, post } from "../../api.js";
import { ROW_BOUNDS, isBound, isOfKey, subjectName, textOf } from "../../limits.js";
import { Failure, Skeleton } from "../../parts/states.js";
import { html, useEffect, useState } from "../../vendor/preact.js";
import { ProjectLimits } from "./project_limits.js";

const kindOf = (subject) => (subject === "*" ? "project" : isOfKey(subject) ? "key" : "model");
const ORDER = ["project", "key", "model"];

export function Limits({ project, currency }) {
  const path = apiPath`organization/projects/${project.id}`;
  const [state, setState] = useState({ limits: null, keys: [], error: null });
  const [added, setAdded] = useState([]);
  const load = async () => {
    try {
      const [limits, keys] = await Promise.all([getAll(`${path}/rate_limits`), getAll(`${path}/api_keys`)]);
      setState({ limits, keys, error: null });
    } catch (error) {
      setState((old) => ({ ...old, error }));
    }
  };
  useEffect(() => void load(), [path]);
  const { limits, keys, error } = state;
  if (error) return html`<${Failure} error=${error} onRetry=${load} />`;
  if (!limits) return html`<${Skeleton} />`;
  const names = Object.fromEntries(keys.map(({ id, name }) => [id, name]));
  const rows = [...limits, ...added.filter((subject) => !limits.some(({ model }) => model === subject)).map((model) => ({ id: `rl-${model}`, model }))]
    .filter((limit) => !isOfKey(limit.model) || isBound(limit) || added.includes(limit.model))
    .sort((one, other) => ORDER.indexOf(kindOf(one.model)) - ORDER.indexOf(kindOf(other.model)));
  const free = keys.filter(({ id }) => !rows.some(({ model }) => model === `key:${id}`));
  const whole = limits.find(({ model }) => model === "*");
  const save = async (limit, fields) => {
    const saved = await post(`${path}/rate_limits/${encodeURIComponent(limit.id)}`, fields);
    setState((old) => ({ ...old, limits: [...old.limits.filter(({ id }) => id !== saved.id), saved] }));
    return saved;
  };
  return html`<p class="quiet">A request counts under every limit that applies to it. An empty field is no bound. Minutes, days and months are those of the clock (UTC). A change holds within a second.</p>
    <div class="scroll"><table class="list limits" aria-label="Limits">
      <thead><tr><th scope="col">Of</th>${ROW_BOUNDS.map(([field, what, time]) => html`<th key=${field} scope="col">${what} <span class="per">${time}</span></th>`)}<th scope="col"><span class="hidden">Actions</span></th></tr></thead>
      <tbody>${rows.map((limit) => html`<${LimitRow} key=${limit.id} limit=${limit} name=${subjectName(limit.model, names)} save=${(fields) => save(limit, fields)} />`)}</tbody>
    </table></div>
    ${free.length > 0 &&
    html`<label class="add">Limit a key<select value="" onChange=${(event) => setAdded([...added, `key:${event.target.value}`])}>
      <option value="">choose one…</option>${free.map(({ id, name }) => html`<option key=${id} value=${id}>${name}</option>`)}
    </select></label>`}
    <${ProjectLimits} path=${path} limit=${whole} saveLimit=${(fields) => save(whole, fields)} currency=${currency} />`;
}

const textsOf = (limit) => Object.fromEntries(ROW_BOUNDS.map((bound) => [bound[0], textOf(limit, bound)]));

function LimitRow({ limit, name, save }) {
  const [texts, setTexts] = useState(textsOf(limit));
  const [error, setError] = useState(null);
  const before = textsOf(limit);
  const changed = ROW_BOUNDS.filter(([field]) => texts[field] !== before[field]);
  const [wrong, , , unit] = changed.find(([field, , , { parse }]) => texts[field] !== "" && parse(texts[field]) === undefined) || [];
  const form = `limit ${limit.id}`;
  const submit = async (event) => {
    event.preventDefault();
    try {
      const saved = await save(Object.fromEntries(changed.map(([field, , , { none, parse }]) => [field, texts[field] === "" ? none : parse(texts[field])])));
      setTexts(textsOf(saved));
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<tr>
    <td><span class="subject"><b class="clip" title=${limit.model}>${name}</b> <span class="quiet small">${kindOf(limit.model) === "project" ? "" : kindOf(limit.model)}</span></span></td>
    ${ROW_BOUNDS.map(
      ([field, what, time]) => html`<td key=${field}><label class="bound"><span class="unit">${what} ${time}</span>
        <input form=${form} inputmode="numeric" class="tabular" placeholder="–" aria-label="${what} ${time} of ${name}" aria-invalid=${wrong === field} value=${texts[field]} onInput=${(event) => setTexts({ ...texts, [field]: event.target.value.trim() })} /></label></td>`,
    )}
    <td><form id=${form} class="row" onSubmit=${submit}>
      ${changed.length > 0 && html`<button class="primary" aria-label="Save the limits of ${name}" disabled=${Boolean(wrong)}>Save</button><button type="button" class="plain" onClick=${() => setTexts(before)}>Undo</button>`}
      ${wrong && html`<span class="bad small" role="alert">${unit.rule}</span>`}
      ${error && html`<span class="bad small" role="alert">${error.message}</span>`}
    </form></td>
  </tr>`;
}
