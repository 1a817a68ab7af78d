// The work of a subagent, under the call that created it.

import { count, shortId } from "../format.js";
import { Failure, Skeleton, Status } from "../parts/states.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { SessionItem, durationOf } from "./session_cards.js";
import { hasEnded, isFinal } from "./session_state.js";

const MOST_CHARS = 160;

export function Subagent({ id, live }) {
  const [isOpen, setOpen] = useState(false);
  const [error, setError] = useState(null);
  const { session, subagents } = live.state;
  const { subagent, turn, items, isRead, hasEarlier } = subagents.get(id) || { items: [] };
  const read = () => live.readSubagent(id).then(() => setError(null), setError);
  useEffect(() => {
    if (isOpen && !isRead) read();
  }, [isOpen, isRead]);
  const works = Boolean(turn && !hasEnded(turn));
  const waits = works && session.required_actions?.some((action) => action.turn_id === turn.id);
  const status = waits ? "requires_action" : works ? "in_progress" : turn?.status || "";
  const name = subagent?.name || "subagent";
  // the call above shows the task, which is the first item
  const shown = hasEarlier || items[0]?.type !== "agent_message" ? items : items.slice(1);
  return html`<details class="subagent" open=${isOpen} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><b class="clip">${name}</b>${status && html`<${Status} status=${status} word=${waits ? "waits for you" : works ? "working" : status} />`}
      ${subagent?.status === "closed" && html`<span class="small quiet">closed</span>`}
      ${turn && html`<span class="small quiet tabular">${durationOf(turn)}</span>`}
      ${turn?.usage && html`<span class="small quiet tabular">${count(turn.usage.total_tokens)} tokens</span>`}
      ${works && !isOpen && html`<span class="clip small quiet last">${lastOf(items)}</span>`}</summary>
    ${isOpen && html`<section class="inside" aria-label=${`Work of ${name}`}>
      ${error && html`<${Failure} error=${error} onRetry=${read} />`}
      ${!isRead && !error && html`<${Skeleton} />`}
      ${hasEarlier && html`<p class="small quiet">Its newest items.</p>`}
      ${isRead && shown.map((item) => html`<${SessionItem} key=${item.id} item=${item} isRunning=${works && item.turn_id === turn.id && !isFinal(item) && Boolean(item.status)} model=${name} who=${whoOf(item, live.state)} />`)}
      ${turn?.error && html`<div class="failure"><b>${turn.error.message}</b><div class="mono small">${turn.error.code}</div></div>`}
    </section>`}
  </details>`;
}

const nameOf = ({ session, subagents }, id) => subagents.get(id)?.subagent?.name || (id === session.agent.id ? "agent" : shortId(id));

/** Between which agents an item is, by their names. */
export function whoOf(item, state) {
  if (!item.sender_agent_id) return "";
  const recipients = item.recipient_agent_ids || [item.recipient_agent_id];
  const [sender, ...others] = [item.sender_agent_id, ...recipients.filter(Boolean)].map((id) => nameOf(state, id));
  return `${sender} → ${others.join(", ")}`;
}

/** The name of the subagent whose turn waits in a call; empty for the agent of the session. */
export function waitingName(action, state) {
  const id = state.ofTurn.get(action.turn_id);
  return id ? nameOf(state, id) : "";
}

/** What it does now, in one line. */
function lastOf(items) {
  const item = items.findLast(({ type }) => type !== "agent_message");
  if (!item) return "";
  if (item.type === "command_execution") return `$ ${item.command}`.slice(0, MOST_CHARS);
  if (item.type === "message") return (item.content || []).map((part) => part?.text || "").join("").slice(-MOST_CHARS);
  return item.name || item.type.replace(/_/g, " ");
}
