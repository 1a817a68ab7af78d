// The limits that only a whole project has: the data that it stores, and the money that it spends.

import { call, get, post } from "../../api.js";
import { CENTS, PROJECT_BOUNDS, textOf } from "../../limits.js";
import { html, useEffect, useState } from "../../vendor/preact.js";

export function ProjectLimits({ path, limit, saveLimit, currency }) {
  return html`<h2>Of the whole project only</h2>
    <div class="sheet whole">
      ${PROJECT_BOUNDS.map((bound) => {
        const [field, what, time, unit] = bound;
        const save = (number) => saveLimit({ [field]: number ?? unit.none });
        return html`<${LimitField} key=${field} label=${`${what[0].toUpperCase()}${what.slice(1)} ${time}`} unit=${unit} text=${textOf(limit, bound)} save=${save} note="Responses, conversations and other entries of the store. A project that has more gets errors instead of new ones." />`;
      })}
      ${currency && html`<${SpendLimit} path="${path}/spend_limit" currency=${currency} />`}
    </div>`;
}

function SpendLimit({ path, currency }) {
  const [limit, setLimit] = useState(undefined);
  const [error, setError] = useState(null);
  useEffect(() => {
    get(path).then(setLimit, (failure) => (failure.status === 404 ? setLimit(null) : setError(failure)));
  }, [path]);
  const save = async (cents) => {
    if (cents !== null) setLimit(await post(path, { currency, interval: "month", threshold_amount: cents }));
    else setLimit(await call("DELETE", path).then(() => null));
  };
  if (error) return html`<span class="bad small" role="alert">${error.message}</span>`;
  if (limit === undefined) return null;
  const spent = limit && `${CENTS.textOf(limit.spent_amount)} ${currency} are spent or reserved in this month (UTC)`;
  const note = !limit
    ? "What models cost is set by the run config (accounts.prices)."
    : limit.enforcement.status === "enforcing"
      ? html`<b class="amber">${spent}: requests are refused.</b>`
      : `${spent}.`;
  return html`<${LimitField} label="Money per month, ${currency}" unit=${CENTS} text=${limit ? CENTS.textOf(limit.threshold_amount) : ""} save=${save} note=${note} />`;
}

/** A bound that is saved by itself; `save` takes a number, null for no bound. */
function LimitField({ label, unit, text, note, save }) {
  const [typed, setTyped] = useState(text);
  const [error, setError] = useState(null);
  useEffect(() => setTyped(text), [text]);
  const number = typed === "" ? null : unit.parse(typed);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await save(number);
      setTyped(number === null ? "" : unit.textOf(number));
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  const problem = number === undefined ? unit.rule : error?.message;
  return html`<form onSubmit=${submit}>
    <label>${label}<input class="tabular" placeholder="–" value=${typed} aria-invalid=${number === undefined} onInput=${(event) => setTyped(event.target.value.trim())} /></label>
    <span class="row">
      ${typed !== text && html`<button class="primary" aria-label="Save the limit of ${label}" disabled=${number === undefined}>Save</button><button type="button" class="plain" onClick=${() => setTyped(text)}>Undo</button>`}
    </span>
    ${problem ? html`<p class="bad small" role="alert">${problem}</p>` : html`<p class="quiet small">${note}</p>`}
  </form>`;
}
