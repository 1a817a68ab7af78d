// The schedules: automations of the API.

import { DeleteButton, Empty, Failure, Status, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf } from "../route.js";
import { html, useState } from "../vendor/preact.js";
import { erase, read } from "./api.js";
import { TARGETS } from "./schedule_fields.js";
import { Controls, WhenText, pathOf } from "./schedule_parts.js";
import { SectionBar } from "./section_bar.js";

export function ScheduleList() {
  const pages = usePages("agents/automations", {}, read);
  const [error, setError] = useState(null);
  const create = html`<a class="button" href=${hashOf({ view: "agents", id: "schedules", tab: "new" })}>New schedule</a>`;
  const columns = [
    ["Schedule", (row) => html`<a class="clip" href=${hashOf({ view: "agents", id: row.id })}>${row.name}</a>`],
    ["State", (row) => html`<${Status} status=${row.status} />`],
    ["When", (row) => html`<${WhenText} schedule=${row} />`],
    ["Next", (row) => (row.next_times?.length ? html`<${Time} at=${row.next_times[0]} />` : "")],
    ["Begins", (row) => html`<span class="clip quiet">${TARGETS[row.target.type] || row.target.type}</span>`],
    [
      "",
      (row) => html`<span class="row actions"><${Controls} schedule=${row} onDone=${pages.reload} onError=${setError} />
        <${DeleteButton} what=${row.name} onDelete=${() => erase(pathOf(row.id)).then(() => pages.drop(row.id))} /></span>`,
    ],
  ];
  return html`<div class="page agents">
    <${SectionBar} current="schedules">${create}<button onClick=${pages.reload}>Refresh</button><//>
    ${error && html`<${Failure} error=${error} />`}
    <${Table}
      label="Schedules"
      labelled
      pages=${pages}
      columns=${columns}
      empty=${html`<${Empty} title="There is no schedule yet."><p>A schedule begins a session or a response, once or again and again.</p>${create}<//>`}
    />
  </div>`;
}
