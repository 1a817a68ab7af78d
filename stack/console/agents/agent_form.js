// The form of an agent.

import { problemOf } from "../schema/metaschema.js";
import { Failure } from "../parts/states.js";
import { useTools } from "../tools.js";
import { html, useMemo, useState } from "../vendor/preact.js";
import { EFFORTS, SUMMARIES, changesOf, fieldsOf } from "./agent_fields.js";
import { MetadataFields } from "./metadata_fields.js";
import { ToolFields } from "./tool_fields.js";

/** `onSave(body)` returns a promise; the form then shows the agent that it is given. */
export function AgentForm({ agent, models, onSave }) {
  const [fields, setFields] = useState(() => fieldsOf(agent));
  const [error, setError] = useState(null);
  const [state, setState] = useState("");
  const server = useTools();
  const set = (name) => (event) => change({ [name]: event.target.value });
  const change = (next) => {
    setFields({ ...fields, ...next });
    setState("");
  };
  const problem = problemOf("functions", fields.tools.functions);
  const body = useMemo(() => {
    try {
      return problem ? null : changesOf(fields, agent);
    } catch {
      return null;
    }
  }, [fields, agent, problem]);
  const isWhole = body && fields.model && (!agent || Object.keys(body).length > 0);
  const submit = async (event) => {
    event.preventDefault();
    if (!isWhole || state === "saving") return;
    setState("saving");
    setError(null);
    try {
      const saved = await onSave(body);
      setFields(fieldsOf(saved));
      setState("saved");
    } catch (failure) {
      setError(failure);
      setState("");
    }
  };
  const known = models.filter(({ id }) => !id.startsWith("agent/")).map(({ id }) => id);
  return html`<form class="agent-form" aria-label="Agent" onSubmit=${submit}>
    <div class="pair">
      <label>Name<input maxlength="256" placeholder="without a name" value=${fields.name} onInput=${set("name")} /></label>
      <label>Model<select value=${fields.model} onChange=${set("model")}>
        ${!fields.model && html`<option value="">choose a model</option>`}
        ${[...new Set([...known, fields.model])].filter(Boolean).map((id) => html`<option key=${id} value=${id}>${id}</option>`)}
      </select></label>
      <label>Effort<select value=${fields.effort} onChange=${set("effort")}><option value="">default</option>${EFFORTS.map((effort) => html`<option key=${effort} value=${effort}>${effort}</option>`)}</select></label>
      <label>Reasoning that is shown<select value=${fields.summary} onChange=${set("summary")}><option value="">none</option>${SUMMARIES.map((summary) => html`<option key=${summary} value=${summary}>${summary === "auto" ? "a summary" : `a ${summary} summary`}</option>`)}</select></label>
    </div>
    <label>Instructions<textarea rows="7" placeholder="You are …" value=${fields.instructions} onInput=${set("instructions")}></textarea></label>
    <${ToolFields} value=${fields.tools} server=${server} problem=${problem} onChange=${(tools) => change({ tools })} />
    <${MetadataFields} rows=${fields.metadata} onChange=${(metadata) => change({ metadata })} />
    ${error && html`<${Failure} error=${error} />`}
    <div class="row"><button class="primary" disabled=${!isWhole || state === "saving"}>${agent ? "Save" : "Create the agent"}</button>
      <span class="quiet small" role="status">${state === "saved" ? "Saved." : state === "saving" ? "Saving…" : agent && isWhole ? `Changed: ${Object.keys(body).join(", ")}.` : ""}</span></div>
  </form>`;
}
