// The items of a session in their turns.

import { count } from "../format.js";
import { Status, Time } from "../parts/states.js";
import { html } from "../vendor/preact.js";
import { Artifacts } from "./artifacts.js";
import { SessionItem, durationOf } from "./session_cards.js";
import { hasEnded, isFinal } from "./session_state.js";
import { Subagent, whoOf } from "./subagent.js";

/** Items in a row that belong to one turn. */
function groupsOf(items) {
  const groups = [];
  for (const item of items) {
    const last = groups.at(-1);
    if (last && last.id === item.turn_id) last.items.push(item);
    else groups.push({ id: item.turn_id, items: [item] });
  }
  return groups;
}

export function Timeline({ live, artifacts, model }) {
  const { state } = live;
  return groupsOf(state.items).map(({ id, items }, index) => {
    const turn = state.turns.get(id);
    const isOpen = turn && !hasEnded(turn);
    return html`<section key=${`${id} ${index && ""}`} class="turn" aria-label="Turn">
      ${turn && html`<${TurnHead} turn=${turn} waits=${isOpen && state.session.status === "requires_action"} />`}
      ${items.map((item) => [
        html`<${SessionItem} key=${item.id} item=${item} isRunning=${Boolean(isOpen && !isFinal(item) && item.role !== "user" && item.status)} model=${model} who=${whoOf(item, state)} />`,
        item.subagent_id && html`<${Subagent} key=${item.subagent_id} id=${item.subagent_id} live=${live} />`,
      ])}
      ${artifacts.has(id) && html`<${Artifacts} list=${artifacts.get(id)} />`}
      ${turn?.error && html`<div class="failure"><b>${turn.error.message}</b><div class="mono small">${turn.error.code}</div></div>`}
    </section>`;
  });
}

function TurnHead({ turn, waits }) {
  const status = waits ? "requires_action" : turn.status;
  return html`<header class="turn-head row small quiet">
    <${Time} at=${turn.created_at} />${status !== "completed" && html`<${Status} status=${status} word=${waits ? "waits for you" : status} />`}
    <span class="tabular">${durationOf(turn)}</span>
    ${turn.usage && html`<span class="tabular">${count(turn.usage.input_tokens)} in · ${count(turn.usage.output_tokens)} out</span>`}
  </header>`;
}
