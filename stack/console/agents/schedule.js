// One schedule: its next times, its last runs, and what changes it.

import { shortId } from "../format.js";
import { DeleteButton, Empty, Failure, Id, Skeleton, Status, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf } from "../route.js";
import { html, useCallback, useEffect, useState } from "../vendor/preact.js";
import { erase, read } from "./api.js";
import { ownZone } from "./schedule_fields.js";
import { EditSchedule } from "./schedule_form.js";
import { Controls, WhenText, pathOf } from "./schedule_parts.js";
import { ObjectBar } from "./section_bar.js";

const REFRESH_MS = 3000;

export function Schedule({ route, models }) {
  const { id } = route;
  const [schedule, setSchedule] = useState(null);
  const [error, setError] = useState(null);
  const runs = usePages(`${pathOf(id)}/invocations`, {}, read);
  const load = useCallback(() => read(pathOf(id)).then((found) => (setSchedule(found), setError(null)), setError), [id]);
  const reload = () => (load(), runs.reload());
  useEffect(() => void load(), [id]);
  const isDue = schedule?.next_times?.[0];
  const hasQueued = (runs.rows || []).some(({ status }) => status === "queued");
  useEffect(() => {
    // what is queued is delivered soon, and a time that comes brings a run
    const timer = setInterval(() => document.visibilityState === "visible" && (hasQueued || isDue * 1000 < Date.now()) && reload(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [hasQueued, isDue]);
  const deleted = async () => {
    await erase(pathOf(id));
    location.hash = hashOf({ view: "agents", id: "schedules" });
  };
  return html`<div class="page agents">
    <${ObjectBar} section="schedules" title=${schedule?.name || shortId(id)}>
      ${schedule && html`<${Status} status=${schedule.status} />`}<span class="grow"></span>
      ${schedule && html`<${Controls} schedule=${schedule} onDone=${reload} onError=${setError} /><${DeleteButton} what=${schedule.name} onDelete=${deleted} />`}
    <//>
    ${error && html`<${Failure} error=${error} onRetry=${reload} />`}
    ${!schedule && !error && html`<${Skeleton} />`}
    ${schedule &&
    html`${schedule.pause_reason && html`<div class="notice">${REASONS[schedule.pause_reason] || schedule.pause_reason}</div>`}
      <div class="two side-first">
        <${EditSchedule} schedule=${schedule} models=${models} onSaved=${setSchedule} />
        <div class="side"><${Next} schedule=${schedule} />
          <section aria-label="Last runs"><h2>Last runs</h2>
            <${Table} label="Last runs" labelled pages=${runs} columns=${RUN_COLUMNS} empty=${html`<${Empty} title="It has not run yet." />`} /></section></div>
      </div>`}
  </div>`;
}

const REASONS = { target_session_failed: "It rests because its session has failed, or is no longer there." };

function Next({ schedule }) {
  const { next_times: times = [], timezone, status } = schedule;
  const hasOther = timezone && timezone !== ownZone();
  return html`<section aria-label="Next times"><h2>Next times</h2>
    <p><${WhenText} schedule=${schedule} /></p>
    ${times.length
      ? html`<ol class="times">${times.map((at) => html`<li key=${at} class="tabular"><${Time} at=${at} />${hasOther && html` <span class="quiet small">${inZone(at, timezone)} in ${timezone}</span>`}</li>`)}</ol>`
      : html`<p class="quiet">${status === "paused" ? "None: it is paused." : "None."}</p>`}
  </section>`;
}

function inZone(seconds, timeZone) {
  try {
    return new Date(seconds * 1000).toLocaleTimeString(undefined, { timeZone, timeStyle: "short" });
  } catch {
    return ""; // a zone that this browser does not know
  }
}

/** Where the work of a run is shown. */
function Work({ run }) {
  if (run.session_id) return html`<${Id} id=${run.session_id} href=${hashOf({ view: "agents", id: run.session_id })} />`;
  if (run.response_id) return html`<${Id} id=${run.response_id} href=${hashOf({ view: "responses", id: run.response_id })} />`;
  if (run.error) return html`<span class="bad small">${run.error.message}</span>`;
  return run.skip_reason ? html`<span class="quiet small">an earlier run still waited</span>` : "";
}

const RUN_COLUMNS = [
  ["Time", (run) => html`<${Time} at=${run.scheduled_at || run.created_at} />`],
  ["State", (run) => html`<${Status} status=${run.status} word=${run.status === "completed" ? "delivered" : run.status} />`],
  ["By", (run) => html`<span class="quiet small">${run.source?.type === "manual" ? "hand" : "schedule"}</span>`],
  ["Work", (run) => html`<${Work} run=${run} />`],
];
