// One agent: its form, a way to try it, its sessions, and how programs call it.

import { apiPath } from "../api.js";
import { shortId } from "../format.js";
import { CodeSamples } from "../parts/code_samples.js";
import { JsonTree } from "../parts/json_tree.js";
import { DeleteButton, Failure, Id, Skeleton, Status, Time } from "../parts/states.js";
import { hashOf } from "../route.js";
import { loadSettings, saveSettings } from "../settings.js";
import { html, useCallback, useEffect, useState } from "../vendor/preact.js";
import { restOf } from "./agent_fields.js";
import { AgentForm } from "./agent_form.js";
import { erase, read, write } from "./api.js";
import { ObjectBar } from "./section_bar.js";
import { StartSession } from "./start_session.js";

const SHOWN_SESSIONS = 8;

export function Agent({ route, models, onModels }) {
  const { id } = route;
  const isNew = id === "new";
  const [agent, setAgent] = useState(null);
  const [error, setError] = useState(null);
  const load = useCallback(() => {
    setError(null);
    if (!isNew) read(apiPath`agents/${id}`).then(setAgent, setError);
  }, [id]);
  useEffect(load, [id]);
  const save = async (body) => {
    const saved = await write(isNew ? "agents" : apiPath`agents/${id}`, body);
    onModels();
    if (isNew) location.hash = hashOf({ view: "agents", id: saved.id });
    else setAgent(saved);
    return saved;
  };
  const deleted = async () => {
    await erase(apiPath`agents/${id}`);
    onModels();
    location.hash = hashOf({ view: "agents" });
  };
  const title = isNew ? "New agent" : agent?.name || shortId(id);
  return html`<div class="page agents">
    <${ObjectBar} section="agents" title=${title}><span class="grow"></span>${agent && html`<${Id} id=${id} /><${DeleteButton} what=${agent.name || id} onDelete=${deleted} />`}<//>
    ${error && html`<${Failure} error=${error} onRetry=${load} />`}
    ${!agent && !isNew && !error && html`<${Skeleton} />`}
    <div class="two">
      ${(agent || isNew) && html`<${AgentForm} agent=${agent} models=${models} onSave=${save} />`}
      ${agent && html`<div class="side"><${Try} agent=${agent} onModels=${onModels} /><${Sessions} id=${id} /><${Use} agent=${agent} /></div>`}
    </div>
  </div>`;
}

function Try({ agent, onModels }) {
  const [problem, setProblem] = useState("");
  const model = `agent/${agent.id}`;
  const chat = async () => {
    const models = await onModels();
    if (!models.some(({ id }) => id === model)) return setProblem("The Playground lists the newest 100 agents, and this one is older: start a session.");
    saveSettings({ ...loadSettings(), model });
    return (location.hash = hashOf({ view: "playground" }));
  };
  return html`<section aria-label="Try it"><h2>Try it</h2>
    <${StartSession} agent=${agent} />
    <p class="small">or <button type="button" class="plain link" onClick=${chat}>chat with it in the Playground</button> as the model <code class="mono">${shortId(agent.id)}</code></p>
    ${problem && html`<p class="bad small" role="alert">${problem}</p>`}
  </section>`;
}

function Sessions({ id }) {
  const [page, setPage] = useState(null);
  useEffect(() => {
    const stops = new AbortController();
    read("agents/sessions", { agent_id: id, limit: SHOWN_SESSIONS }, stops.signal).then(setPage, () => {});
    return () => stops.abort();
  }, [id]);
  if (!page?.data.length) return null;
  return html`<section aria-label="Latest sessions"><h2>Latest sessions</h2>
    <ul class="rows">${page.data.map(
      (session) => html`<li key=${session.id} class="row"><${Id} id=${session.id} href=${hashOf({ view: "agents", id: session.id })} /><${Status} status=${session.status} /><span class="grow"></span><span class="quiet small"><${Time} at=${session.last_active_at} /></span></li>`,
    )}</ul>
    ${page.has_more && html`<a class="small" href=${hashOf({ view: "agents", id: "sessions", params: { agent: id } })}>All its sessions</a>`}
  </section>`;
}

function Use({ agent }) {
  const rest = restOf(agent);
  return html`<details><summary><b>As code</b> <span class="quiet small">any client of this server calls it as a model</span></summary>
      <${CodeSamples} body=${{ model: `agent/${agent.id}`, input: "Hello" }} /></details>
    <details><summary><b>Other fields</b> <span class="quiet small">saving leaves them as they are</span></summary><${JsonTree} value=${rest} open=${1} /></details>`;
}
