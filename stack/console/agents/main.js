// Agents, their sessions and their schedules. These modules and their style are loaded when the view is opened.

import { html } from "../vendor/preact.js";
import { Agent } from "./agent.js";
import { AgentList } from "./agent_list.js";
import { Schedule } from "./schedule.js";
import { ScheduleForm } from "./schedule_form.js";
import { ScheduleList } from "./schedule_list.js";
import { Session } from "./session.js";
import { SessionList } from "./session_list.js";

/** The view by what the URL names, an id by its beginning. */
const VIEWS = [
  [/^$/, AgentList],
  [/^(new$|agent_)/, Agent],
  [/^sessions$/, SessionList],
  [/^sess_/, Session],
  [/^schedules$/, ({ route, ...rest }) => html`<${route.tab === "new" ? ScheduleForm : ScheduleList} route=${route} ...${rest} />`],
  [/^automation_/, Schedule],
];

export function Agents(props) {
  const [, View] = VIEWS.find(([pattern]) => pattern.test(props.route.id)) || VIEWS[0];
  return html`<${View} ...${props} />`;
}

/** Resolve when the style is there, or cannot be loaded: the view is then plain. */
function loadStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("agents.css", import.meta.url).href;
  const loaded = new Promise((resolve) => (link.onload = link.onerror = resolve));
  document.head.append(link);
  return loaded;
}

await loadStyle();
