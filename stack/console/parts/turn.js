// One turn of a thread: the question, what the model and its tools made of it, the branches, and what it used.

import { questionOf } from "../thread.js";
import { html } from "../vendor/preact.js";
import { Icon } from "./icons.js";
import { Item, Items } from "./items.js";
import { Copy, Failure, Reconnecting, Status } from "./states.js";
import { UsageBar } from "./usage_bar.js";
import { ReadAloud } from "./voice.js";

export function Turn({ turn, index, thread, selected, onSelect, actions, onRetry, onEdit }) {
  const { run, input } = turn;
  const { response } = run.state;
  const status = run.running ? "running" : response?.status;
  const isUser = input.every((item) => !item.type || item.type === "message");
  const branches = thread.branchesAt(turn);
  const answer = answerOf(run.state.items);
  return html`<article class="turn" aria-label="Turn ${index + 1 + thread.earlier.length}">
    ${turn.followsDeleted && html`<p class="quiet small">An earlier turn was deleted.</p>`}
    ${input.map((item, at) => html`<${Item} key=${at} item=${{ type: "message", ...item }} />`)}
    <${Items} items=${run.state.items} meta=${run.state.meta} running=${run.running} selected=${selected} onSelect=${onSelect} actions=${actions} tools=${response?.tools} model=${response?.model || run.request?.model} />
    ${run.running && !run.state.items.length && html`<div class="item"><${Waiting} run=${run} /></div>`}
    <${Reconnecting} run=${run} />
    ${(run.failure || run.state.error) && html`<${Failure} error=${run.failure || run.state.error} onRetry=${onRetry} />`}
    ${!run.running &&
    html`<footer class="row">
      ${branches.ids.length > 1 && html`<${Arrows} ...${branches} onChoose=${(id) => thread.switchTo(index, id)} />`}
      ${status && status !== "completed" && html`<${Status} status=${run.isStopped ? "stopped" : status} />`}
      ${response?.incomplete_details?.reason && html`<span class="quiet small">${response.incomplete_details.reason.replace(/_/g, " ")}</span>`}
      <${UsageBar} usage=${response?.usage} firstMs=${run.firstAt && run.firstAt - run.startedAt} totalMs=${run.endedAt - run.startedAt || undefined} />
      <span class="row acts">${answer && html`<${Copy} text=${answer} label="Copy the answer" /><${ReadAloud} text=${answer} />`}
      ${isUser && questionOf(input) && html`<button class="plain" onClick=${onEdit}>Edit</button>`}<button class="plain" onClick=${onRetry}>Retry</button></span>
    </footer>`}
  </article>`;
}

/** The branches of a turn: `2/3` with arrows. */
function Arrows({ ids, at, onChoose }) {
  const arrow = (by, label, icon) =>
    html`<button class="plain" aria-label=${label} disabled=${!ids[at + by]} onClick=${() => onChoose(ids[at + by])}><${Icon} name=${icon} /></button>`;
  return html`<span class="row arrows" role="group" aria-label="Branches">
    ${arrow(-1, "Earlier branch", "left")}<span class="tabular small">${at + 1}/${ids.length}</span>${arrow(1, "Later branch", "right")}
  </span>`;
}

const Waiting = ({ run }) => html`<${Status} status=${run.state.response?.status === "queued" ? "queued" : "running"} />`;

/** The text of the answer as the model wrote it. */
const answerOf = (items) =>
  items
    .flatMap((item) => (item?.type === "message" && Array.isArray(item.content) ? item.content : []))
    .map((part) => part?.text || "")
    .filter(Boolean)
    .join("\n\n");
