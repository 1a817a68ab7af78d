// One item of a session. Those that responses have too are shown by the parts of the page; a type that is not known shows
// as JSON.

import { ms, pretty } from "../format.js";
import { Item } from "../parts/items.js";
import { Lane, Output } from "../parts/lane.js";
import { Copy } from "../parts/states.js";
import { html, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact.js";

const LIVE_CHARS = 8000;

/** An item is drawn again when it has changed, and not with each event of another one. */
export function SessionItem({ item, isRunning, model, who }) {
  return useMemo(() => {
    const Card = CARDS[item.type];
    if (!Card) return html`<${Item} item=${asOfResponse(item)} running=${isRunning} model=${model} />`;
    return html`<${Framed} item=${item}><${Card} item=${item} isRunning=${isRunning} who=${who} /><//>`;
  }, [item, isRunning, model, who]);
}

function Framed({ item, children }) {
  const [broken] = useErrorBoundary((bug) => console.error(bug));
  return html`<section class="item ${item.type}" data-item=${item.id}>${broken ? html`<div class="failure">This item cannot be shown: ${broken.message}</div>` : children}</section>`;
}

/** Arguments of calls are objects here, and texts in a response. */
const asOfResponse = (item) => (item.arguments && typeof item.arguments === "object" ? { ...item, arguments: pretty(item.arguments) } : item);

function Command({ item, isRunning }) {
  const { command, cwd, output, exit_code: code, duration_ms: duration } = item;
  const failed = Number.isInteger(code) && code !== 0;
  return html`<${Lane} label="command" running=${isRunning} status=${failed && item.status === "completed" ? "" : item.status} elapsed=${duration ?? undefined}>
    <div class="cell command"><pre class="wrap" tabindex="0" aria-label="command"><span class="quiet" aria-hidden="true">$ </span>${textOf(command)}</pre><${Copy} text=${textOf(command)} label="Copy the command" /></div>
    ${output ? html`<${Terminal} text=${output} isRunning=${isRunning} isCut=${item.isCut} />` : ""}
    <p class="small quiet facts-line">${Number.isInteger(code) && html`<span class=${failed ? "bad" : ""}>exit code ${code}</span>`}${cwd && html`<span class="mono">${cwd}</span>`}</p>
  <//>`;
}

const textOf = (command) => (Array.isArray(command) ? command.join(" ") : typeof command === "string" ? command : pretty(command ?? ""));

/** Output as it comes: its end is in sight. */
function Terminal({ text, isRunning, isCut }) {
  const box = useRef(null);
  const [isWhole, setWhole] = useState(false);
  const shown = isWhole ? text : text.slice(-LIVE_CHARS);
  useLayoutEffect(() => {
    if (isRunning && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown, isRunning]);
  return html`${(isCut || shown.length < text.length) &&
    html`<p class="small quiet">${isCut ? "The beginning is left out while it runs." : html`Its end. <button type="button" class="plain link" onClick=${() => setWhole(true)}>Show all ${text.length} characters</button>`}</p>`}
    <pre ref=${box} class="wrap output terminal" tabindex="0" aria-label="output">${shown}</pre>`;
}

function FunctionResult({ item }) {
  const { output, error } = item;
  return html`<${Lane} label=${error || item.status === "failed" ? "failure of the function" : "result of the function"} status=${item.status}>
    ${error && html`<div class="bad"><${Output} text=${String(error)} label="error" /></div>`}
    ${(Array.isArray(output) ? output : [output]).map((part, index) => html`<${ResultPart} key=${index} part=${part} />`)}
  <//>`;
}

function ResultPart({ part }) {
  if (part === null || part === undefined || part === "") return null;
  if (typeof part === "string") return html`<${Output} text=${part} />`;
  if (part.text !== undefined) return html`<${Output} text=${String(part.text)} />`;
  if ((part.image_url || "").startsWith("data:image/")) return html`<img class="attached" src=${part.image_url} alt="picture" />`;
  return html`<${Output} text=${pretty(part)} />`;
}

/** Messages between agents, and calls of subagents. */
function AgentMessage({ item, isRunning, who }) {
  return html`<${Lane} label=${item.type.replace(/_call$/, "").replace(/_/g, " ")} running=${isRunning} status=${item.status}>
    ${who && html`<p class="small quiet">${who}</p>`}
    ${(item.content || []).map((part, index) => html`<${ResultPart} key=${index} part=${part} />`)}
  <//>`;
}

const SUBAGENT = ["agent_message", ...["create_subagent", "send_subagent_input", "wait_for_subagents", "resume_subagent", "interrupt_subagent", "close_subagent"].map((name) => `${name}_call`)];

const CARDS = {
  command_execution: Command,
  function_call_output: FunctionResult,
  ...Object.fromEntries(SUBAGENT.map((type) => [type, AgentMessage])),
};

/** The time of a turn, which is known in whole seconds. */
export function durationOf({ started_at: start, completed_at: end }) {
  if (!start || !end) return "";
  return end === start ? "under 1 s" : ms((end - start) * 1000).replace(".00", "").replace(".0", "");
}
