// What the list of schedules and the view of one share: when it comes, and its three buttons.

import { apiPath } from "../api.js";
import { Time } from "../parts/states.js";
import { html } from "../vendor/preact.js";
import { write } from "./api.js";

export const pathOf = (id) => apiPath`agents/automations/${id}`;

export const WhenText = ({ schedule }) =>
  schedule.type === "once" ? html`once, <${Time} at=${schedule.run_at} />` : html`<span class="row"><code class="mono">${schedule.expression}</code><span class="quiet small">${schedule.timezone}</span></span>`;

/** The three buttons of a schedule. */
export function Controls({ schedule, onDone, onError }) {
  const { id, name, status } = schedule;
  const act = (verb) => () => write(`${pathOf(id)}/${verb}`).then(() => (onError(null), onDone()), onError);
  return html`<button type="button" aria-label="Run ${name} now" onClick=${act("invocations")}>Run now</button>
    ${status === "active" && html`<button type="button" aria-label="Pause ${name}" onClick=${act("pause")}>Pause</button>`}
    ${status === "paused" && html`<button type="button" aria-label="Resume ${name}" onClick=${act("resume")}>Resume</button>`}`;
}
