// The form of a schedule: when, and what then begins.

import { apiPath } from "../api.js";
import { shortId } from "../format.js";
import { Failure, useUniqueId } from "../parts/states.js";
import { Switch } from "../parts/tool_switches.js";
import { hashOf } from "../route.js";
import { reasonOf, useTools } from "../tools.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { read, write } from "./api.js";
import { EXAMPLES, TARGETS, bodyOf, fieldsOf, lackOf, ownZone, zones } from "./schedule_fields.js";
import { ObjectBar } from "./section_bar.js";

export function ScheduleForm({ models, route }) {
  const save = async (body) => {
    const { id } = await write("agents/automations", body);
    location.hash = hashOf({ view: "agents", id });
  };
  return html`<div class="page agents"><${ObjectBar} section="schedules" title="New schedule" /><${Fields} models=${models} first=${route.params} onSave=${save} /></div>`;
}

export const EditSchedule = ({ schedule, models, onSaved }) =>
  html`<${Fields} key=${schedule.id} schedule=${schedule} models=${models} onSave=${async (body) => onSaved(await write(apiPath`agents/automations/${schedule.id}`, body))} />`;

function useAgents() {
  const [agents, setAgents] = useState([]);
  useEffect(() => void read("agents", { limit: 100 }).then(({ data }) => setAgents(data), () => {}), []);
  return agents;
}

function Fields({ schedule, models, first = {}, onSave }) {
  const [fields, setFields] = useState(() => ({ ...fieldsOf(schedule), ...(first.session && { target: "existing_session", session: first.session }), ...(first.agent && { who: first.agent }) }));
  const [error, setError] = useState(null);
  const [state, setState] = useState("");
  const set = (name) => (event) => (setFields({ ...fields, [name]: event.target.value }), setState(""));
  const server = useTools();
  const body = bodyOf(fields, schedule);
  const lack = lackOf(fields);
  const mayPress = !lack && state !== "saving" && Object.keys(body).length > 0;
  const submit = async (event) => {
    event.preventDefault();
    if (!mayPress) return;
    setState("saving");
    setError(null);
    try {
      await onSave(body);
      setState("saved");
    } catch (failure) {
      setError(failure);
      setState("");
    }
  };
  return html`<form class="schedule-form" aria-label="Schedule" onSubmit=${submit}>
    <label>Name<input maxlength="256" value=${fields.name} onInput=${set("name")} /></label>
    <${When} fields=${fields} set=${set} isNew=${!schedule} onExpression=${(expression) => setFields({ ...fields, expression })} />
    <fieldset class="stack"><legend>What begins then</legend>
      ${schedule ? html`<p>${TARGETS[fields.target]}</p>` : html`<label>Work<select value=${fields.target} onChange=${set("target")}>${Object.entries(TARGETS).map(([type, words]) => html`<option key=${type} value=${type}>${words}</option>`)}</select></label>`}
      ${fields.target === "existing_session" ? html`<label>Session<input class="mono" placeholder="sess_…" value=${fields.session} onInput=${set("session")} /></label>` : html`<${Who} value=${fields.who} models=${models} onChange=${set("who")} />`}
      ${fields.target === "new_session" && !schedule && html`<${Switch} label="With a workspace" note="a shell and files in a container of this server" reason=${reasonOf(server, "shell")} isOn=${fields.hasWorkspace} onChange=${(event) => setFields({ ...fields, hasWorkspace: event.target.checked })} />`}
      ${fields.isText ? html`<label>Message<textarea rows="4" value=${fields.text} onInput=${set("text")}></textarea></label>` : html`<p class="quiet small">Its input has several parts, which only the API can change.</p>`}
    </fieldset>
    ${error && html`<${Failure} error=${error} />`}
    <div class="row"><button class="primary" disabled=${!mayPress}>${schedule ? "Save" : "Create the schedule"}</button><span class="quiet small" role="status">${state === "saved" ? "Saved." : lack}</span></div>
  </form>`;
}

function When({ fields, set, isNew, onExpression }) {
  const id = useUniqueId();
  return html`<fieldset class="stack"><legend>When</legend>
    ${isNew && html`<label>Repeats<select value=${fields.type} onChange=${set("type")}><option value="periodic">by a cron expression</option><option value="once">once</option></select></label>`}
    ${fields.type === "once"
      ? html`<label>Time, in your zone (${ownZone()})<input type="datetime-local" value=${fields.runAt} onInput=${set("runAt")} /></label>`
      : html`<div class="pair"><label>Cron expression<input class="mono" spellcheck="false" value=${fields.expression} onInput=${set("expression")} aria-describedby=${id} /></label>
            <label>Time zone<input list="zones" value=${fields.timezone} onInput=${set("timezone")} /><datalist id="zones">${zones().map((zone) => html`<option key=${zone} value=${zone}></option>`)}</datalist></label></div>
          <p id=${id} class="quiet small">minute, hour, day of the month, month, day of the week</p>
          <div class="row wrap examples-row">${EXAMPLES.map(([expression, words]) => html`<button key=${expression} type="button" aria-pressed=${fields.expression === expression} onClick=${() => onExpression(expression)}>${words}</button>`)}</div>`}
  </fieldset>`;
}

function Who({ value, models, onChange }) {
  const agents = useAgents();
  const known = models.filter(({ id }) => !id.startsWith("agent/") && !/embed|minilm/i.test(id)).map(({ id }) => `model:${id}`);
  const isOther = value && !known.includes(value) && !agents.some(({ id }) => id === value);
  return html`<label>Agent or model<select value=${value} onChange=${onChange}>
    ${!value && html`<option value="">choose one</option>`}
    ${agents.length > 0 && html`<optgroup label="Agents">${agents.map((agent) => html`<option key=${agent.id} value=${agent.id}>${agent.name || shortId(agent.id)}</option>`)}</optgroup>`}
    <optgroup label="Models">${known.map((key) => html`<option key=${key} value=${key}>${key.slice(6)}</option>`)}</optgroup>
    ${isOther && html`<option value=${value}>${value.replace(/^model:/, "")}</option>`}
  </select></label>`;
}
