// Projects: create, rename, archive, and the way to what belongs to one.

import { apiPath, post } from "../../api.js";
import { ConfirmButton, Empty, Failure, Id, Status, Time } from "../../parts/states.js";
import { Table, usePages } from "../../parts/table.js";
import { hashOf, setParams } from "../../route.js";
import { html, useEffect, useRef, useState } from "../../vendor/preact.js";

export function Projects({ params, onChange }) {
  const archived = params.archived === "1";
  const pages = usePages("organization/projects", { include_archived: archived || undefined });
  const changed = () => Promise.all([pages.reload(), onChange()]);
  const columns = [
    ["Project", (row) => html`<${Name} project=${row} onDone=${changed} />`],
    ["Id", (row) => html`<${Id} id=${row.id} />`],
    ["Status", (row) => html`<${Status} status=${row.status === "active" ? "completed" : "cancelled"} word=${row.status} />`],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
    [
      "",
      (row) => html`<span class="row actions">
        ${["keys", "limits", "usage"].map((tab) => html`<a key=${tab} class="button" href=${hashOf({ view: "team", id: tab, params: { project: row.id } })}>${tab[0].toUpperCase() + tab.slice(1)}</a>`)}
        ${row.status === "active" && html`<${ConfirmButton} verb="Archive" what=${`${row.name}: its keys are refused for ever`} onConfirm=${() => post(apiPath`organization/projects/${row.id}/archive`, {}).then(changed)} />`}
      </span>`,
    ],
  ];
  return html`<div class="row tools">
      <${NewProject} onDone=${changed} /><span class="grow"></span>
      <label class="check"><input type="checkbox" checked=${archived} onChange=${(event) => setParams({ archived: event.target.checked ? "1" : "" })} /> archived ones too</label>
    </div>
    <${Table} label="Projects" labelled pages=${pages} columns=${columns} empty=${html`<${Empty} title="There is no project yet."><p class="quiet">A project is a tenant: its keys share what it has stored, and nobody else's do.</p><//>`} />`;
}

function NewProject({ onDone }) {
  const [name, setName] = useState("");
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post("organization/projects", { name: name.trim() });
      setName("");
      setError(null);
      await onDone();
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<form class="row" onSubmit=${submit}>
      <input placeholder="Name" aria-label="Name of the new project" maxlength="256" value=${name} onInput=${(event) => setName(event.target.value)} /><button class="primary" disabled=${!name.trim()}>New project</button>
    </form>
    ${error && html`<${Failure} error=${error} />`}`;
}

/** The name of a project, which a press on "Rename" turns into a field. */
function Name({ project, onDone }) {
  const [name, setName] = useState(null);
  const [error, setError] = useState(null);
  const field = useRef(null);
  useEffect(() => void field.current?.focus(), [name === null]);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post(apiPath`organization/projects/${project.id}`, { name: name.trim() });
      setName(null);
      await onDone();
    } catch (failure) {
      setError(failure);
    }
  };
  if (name === null)
    return html`<span class="row"><b class="clip">${project.name}</b>
      ${project.status === "active" && html`<button type="button" class="plain" aria-label="Rename ${project.name}" onClick=${() => setName(project.name)}>Rename</button>`}</span>`;
  return html`<form class="row" onSubmit=${submit}>
    <input ref=${field} aria-label="Name" maxlength="256" value=${name} onInput=${(event) => setName(event.target.value)} onKeyDown=${(event) => event.key === "Escape" && setName(null)} />
    <button disabled=${!name.trim()}>Save</button>
    ${error && html`<span class="bad small" role="alert">${error.message}</span>`}
  </form>`;
}
