// What a session waits for: results of functions, typed in by hand, and approvals.

import { pretty } from "../format.js";
import { Icon } from "../parts/icons.js";
import { Output } from "../parts/lane.js";
import { Failure } from "../parts/states.js";
import { html, useState } from "../vendor/preact.js";

const keyOf = (action) => `${action.type} ${action.call_id || action.request_id || action.environment_id || ""}`;

/** `onAnswer(action, event)` returns a promise. `nameOf(action)` names the subagent that waits, if one does. */
export function Waiting({ actions, nameOf, onAnswer }) {
  if (!actions.length) return null;
  return html`<section class="waiting" aria-label="Waiting for you">
    <p class="small" role="status"><b>${actions.length === 1 ? "The agent waits for you." : `The agent waits for ${actions.length} answers.`}</b> <span class="quiet">It can wait for days.</span></p>
    ${actions.map((action) => html`<${Action} key=${keyOf(action)} action=${action} name=${nameOf(action)} onAnswer=${onAnswer} />`)}
  </section>`;
}

function Action({ action, name, onAnswer }) {
  const [error, setError] = useState(null);
  const [waits, setWaits] = useState(false);
  const answer = async (event) => {
    setWaits(true);
    setError(null);
    try {
      await onAnswer(action, event);
    } catch (failure) {
      setError(failure);
      setWaits(false);
    }
  };
  const Body = BODIES[action.type] || Unknown;
  return html`<div class="action">${name && html`<p class="small quiet">for ${name}</p>`}<${Body} action=${action} waits=${waits} answer=${answer} />${error && html`<${Failure} error=${error} />`}</div>`;
}

const Arguments = ({ value }) => {
  const isEmpty = value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length);
  return isEmpty ? html`<p class="quiet small">without arguments</p>` : html`<${Output} text=${typeof value === "string" ? value : pretty(value)} label="arguments" />`;
};

function FunctionCall({ action, waits, answer }) {
  const [text, setText] = useState("");
  const send = (fields) => answer({ type: "agent.session.input.tool_result", turn_id: action.turn_id, call_id: action.call_id, ...fields });
  const submit = (event) => {
    event.preventDefault();
    send({ success: true, output: text });
  };
  return html`<form onSubmit=${submit} aria-label="Result of ${action.name}">
    <h2><${Icon} name="tool" /> ${action.name}</h2>
    <${Arguments} value=${action.arguments} />
    <label>Result of ${action.name}<textarea rows="3" class="mono" spellcheck="false" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>
    <div class="row"><button class="primary" disabled=${waits}>Send the result</button>
      <button type="button" disabled=${waits} onClick=${() => send({ success: false, error: text || "The call failed." })}>Report a failure</button>
      <span class="quiet small">${text ? kindOf(text) : "empty"}</span></div>
  </form>`;
}

function kindOf(text) {
  try {
    JSON.parse(text);
    return "JSON";
  } catch {
    return "plain text";
  }
}

function Approval({ action, waits, answer }) {
  const { request } = action;
  const title = [request?.server_label, request?.name].filter(Boolean).join(" · ");
  const decide = (decision) => () =>
    answer({ type: `agent.session.input.${action.type}_result`, request_id: action.request_id, response: { type: request?.type || "mcp_tool_call", decision } });
  return html`<div role="group" aria-label="Approval of ${title}">
    <h2><${Icon} name="tool" /> ${title}</h2>
    ${request?.message && html`<p>${request.message}</p>`}
    <${Arguments} value=${request?.arguments} />
    <div class="row"><button type="button" class="primary" disabled=${waits} onClick=${decide("approve")}>Approve</button><button type="button" disabled=${waits} onClick=${decide("deny")}>Deny</button></div>
  </div>`;
}

const Unknown = ({ action }) => html`<h2>${action.type.replace(/_/g, " ")}</h2><${Output} text=${pretty(action)} label="what it waits for" /><p class="quiet small">This page cannot answer it.</p>`;

const BODIES = { function_call: FunctionCall, mcp_approval_request: Approval, computer_use_approval_request: Approval };
