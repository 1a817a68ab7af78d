// A first message that begins a session.

import { shortId } from "../format.js";
import { Failure } from "../parts/states.js";
import { hashOf } from "../route.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { read, write } from "./api.js";
import { useTools } from "../tools.js";
import { MessageBox } from "./message_box.js";
import { NO_WORKSPACE, WorkspaceChoice, environmentOf } from "./workspace.js";

/** Start a session of `agent`; without one, of an agent or a model that is chosen here. */
export function StartSession({ agent, models = [] }) {
  const [agents, setAgents] = useState([]);
  const [chosen, setChosen] = useState("");
  const [text, setText] = useState("");
  const [error, setError] = useState(null);
  const [waits, setWaits] = useState(false);
  const [workspace, setWorkspace] = useState(NO_WORKSPACE);
  const server = useTools();
  const key = useRef("");
  useEffect(() => {
    if (!agent) read("agents", { limit: 100 }).then(({ data }) => setAgents(data), setError);
  }, [agent?.id]);
  const known = models.filter(({ id }) => !id.startsWith("agent/") && !/embed|minilm/i.test(id));
  const choice = agent?.id || chosen || agents[0]?.id || (known[0] && `model:${known[0].id}`) || "";
  const start = async () => {
    setWaits(true);
    setError(null);
    key.current ||= crypto.randomUUID(); // a second try after a lost answer finds the session of the first
    const who = choice.startsWith("model:") ? { agent: { model: choice.slice(6) } } : { agent_id: choice };
    try {
      const session = await write("agents/sessions", { ...who, environment: await environmentOf(workspace), input: text }, key.current);
      location.hash = hashOf({ view: "agents", id: session.id });
    } catch (failure) {
      if (failure.status) key.current = "";
      setError(failure);
      setWaits(false);
    }
  };
  return html`<div class="start">
    ${!agent &&
    html`<label>Agent or model<select value=${choice} onChange=${(event) => setChosen(event.target.value)}>
      ${agents.length > 0 && html`<optgroup label="Agents">${agents.map((each) => html`<option key=${each.id} value=${each.id}>${each.name || shortId(each.id)}</option>`)}</optgroup>`}
      <optgroup label="Models">${known.map(({ id }) => html`<option key=${id} value=${`model:${id}`}>${id}</option>`)}</optgroup>
    </select></label>`}
    <${WorkspaceChoice} value=${workspace} server=${server} onChange=${setWorkspace} />
    <${MessageBox} label="First message" verb="Start a session" text=${text} onText=${setText} isBusy=${waits} isOff=${!choice} onSend=${start} />
    ${error && html`<${Failure} error=${error} />`}
  </div>`;
}
