// Team: projects, their keys and limits, and what was used; for administrators.

import { getAll } from "../api.js";
import { Empty, Failure, Skeleton, Tabs } from "../parts/states.js";
import { hashOf, setParams } from "../route.js";
import { html, useCallback, useEffect, useState } from "../vendor/preact.js";
import { AdminKeys, ProjectKeys } from "./team/keys.js";
import { Limits } from "./team/limits.js";
import { Projects } from "./team/projects.js";
import { TeamUsage } from "./team/usage.js";

/** [view, "one" for a view of one project, "any" where all of them are a choice]. A further view is a further row here. */
const TABS = {
  projects: [Projects, null],
  keys: [ProjectKeys, "one"],
  limits: [Limits, "one"],
  usage: [TeamUsage, "any"],
  administrators: [AdminKeys, null],
};

export function Team({ route, access }) {
  const { params } = route;
  const tab = TABS[route.id] ? route.id : "projects";
  const [projects, setProjects] = useState(null);
  const [error, setError] = useState(null);
  const load = useCallback(() => getAll("organization/projects", { include_archived: true }).then(setProjects, setError), []);
  useEffect(() => void load(), []);
  const [View, needs] = TABS[tab];
  const active = (projects || []).filter(({ status }) => status === "active");
  const project = (projects || []).find(({ id }) => id === params.project) || (needs === "one" ? active[0] : undefined);
  const go = (name) => (location.hash = hashOf({ view: "team", id: name, params: { project: params.project } }));
  return html`<div class="page">
    <header class="bar"><h1>Team</h1><span class="grow"></span>
      ${needs && active.length > 0 &&
      html`<label class="inline">Project<select value=${project?.id || ""} onChange=${(event) => setParams({ project: event.target.value })}>
        ${needs === "any" && html`<option value="">all projects</option>`}
        ${(projects || []).filter((each) => each.status === "active" || each === project).map((each) => html`<option key=${each.id} value=${each.id}>${each.name}</option>`)}
      </select></label>`}
    </header>
    <${Tabs} label="Team" names=${Object.keys(TABS)} current=${tab} onChange=${go}>
      ${error
        ? html`<${Failure} error=${error} onRetry=${() => (setError(null), load())} />`
        : !projects
          ? html`<${Skeleton} />`
          : needs === "one" && !project
            ? html`<${Empty} title="There is no project yet."><a class="button" href=${hashOf({ view: "team", id: "projects" })}>Create one</a><//>`
            : html`<${View} key=${`${tab} ${needs ? project?.id : ""}`} project=${project} projects=${projects} params=${params} currency=${access.currency} onChange=${load} />`}
    <//>
  </div>`;
}
