// A tool call: its name, its arguments as they arrive, the state word of the API, its result, and what waits for the client.
//
// `actions.answer(item, answer)` sends a function's output or an approval; it is absent where nothing can be answered.

import { pretty, prettyText } from "../format.js";
import { violations } from "../schema/validate.js";
import { html, useState } from "../vendor/preact.js";
import { CodeCell } from "./code_cell.js";
import { Part } from "./content.js";
import { FunctionForm } from "./function_form.js";
import { HOSTED, Unknown } from "./hosted_cards.js";
import { Lane, Output } from "./lane.js";
import { SchemaValue } from "./schema_form.js";

export function ToolCard({ item, meta, running, elapsed, actions, picks, tools }) {
  const tool = toolOf(tools, item);
  const Body = BODIES[item.type] || Unknown;
  return html`<${Lane} label=${labelOf(item)} status=${item.status} running=${running} elapsed=${elapsed} picks=${picks}>
    ${running && meta.word && html`<span class="quiet">${meta.word.replace(/_/g, " ")}</span>`}
    <${Body} item=${item} tool=${tool} running=${running} actions=${actions} />
  <//>`;
}

/** The declaration of the function that an item calls: in the request's tools, or in a namespace among them. */
function toolOf(tools, item) {
  if (item.type !== "function_call") return undefined;
  const among = item.namespace ? (tools || []).find((tool) => tool.type === "namespace" && tool.name === item.namespace)?.tools : tools;
  return (among || []).find((tool) => tool.type === "function" && tool.name === item.name);
}

const LABELS = {
  web_search_call: "web search",
  file_search_call: "file search",
  code_interpreter_call: "Python",
  image_generation_call: "picture",
  function_call_output: "output of the function",
  custom_tool_call_output: "output of the tool",
  shell_call_output: "output of the shell",
  local_shell_call_output: "output of the shell",
  computer_call_output: "screen",
  tool_search_call: "search for tools",
  tool_search_output: "tools that were found",
  item_reference: "an item from before",
};

function labelOf(item) {
  const kind = item.type.replace(/_call$/, "").replace(/_/g, " ");
  if (item.type === "mcp_call") return `${item.server_label} · ${item.name}`;
  if (item.type === "mcp_list_tools") return `${item.server_label} · tools`;
  if (item.type === "mcp_approval_request") return `${item.server_label} · ${item.name} asks for approval`;
  if (item.type === "mcp_approval_response") return "answer to an approval request";
  if (LABELS[item.type]) return LABELS[item.type];
  return item.name ? `${item.namespace ? `${item.namespace}.` : ""}${item.name}` : kind;
}

const Arguments = ({ text, label = "arguments" }) => (text ? html`<pre class="wrap code" aria-label=${label} tabindex="0">${prettyText(text)}</pre>` : null);

/** The arguments of a whole call by the function's schema; as they arrive, or without a schema, as they are. */
function CallArguments({ text, schema }) {
  const [raw, setRaw] = useState(false);
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    value = null;
  }
  const fits = schema?.properties && value && typeof value === "object" && !Array.isArray(value);
  if (!fits) return html`<${Arguments} text=${text} />`;
  const found = violations(schema, value);
  return html`${raw ? html`<${Arguments} text=${text} />` : html`<${SchemaValue} schema=${schema} value=${value} found=${found} />`}
    <div class="row small">
      ${found.length ? html`<span class="bad">✕ breaks the function's schema: ${found[0].path || "/"} ${found[0].message}</span>` : html`<span class="quiet">✓ fits the function's schema</span>`}
      <button type="button" class="plain" onClick=${() => setRaw(!raw)}>${raw ? "by schema" : "as JSON"}</button>
    </div>`;
}

function FunctionCall({ item, tool, running, actions }) {
  const answers = !running && actions?.answer && actions.isOpen(item);
  return html`${running ? html`<${Arguments} text=${item.arguments ?? item.input} />` : html`<${CallArguments} text=${item.arguments ?? item.input} schema=${tool?.parameters} />`}
    ${answers && html`<${FunctionForm} item=${item} tool=${tool} onAnswer=${(output) => actions.answer(item, output)} />`}`;
}

function FunctionOutput({ item }) {
  if (Array.isArray(item.output)) return item.output.map((part, index) => html`<${Part} key=${index} part=${part} />`);
  const text = typeof item.output === "string" ? prettyText(item.output) : pretty(item.output ?? null);
  return html`<${Output} text=${text} />`;
}

function McpCall({ item }) {
  const error = item.error && (typeof item.error === "string" ? item.error : pretty(item.error));
  return html`<${Arguments} text=${item.arguments} />
    ${item.output && html`<${Output} text=${prettyText(item.output)} />`} ${error && html`<pre class="wrap bad">${error}</pre>`}`;
}

function McpTools({ item }) {
  const [open, setOpen] = useState(false);
  if (item.error) return html`<pre class="wrap bad">${typeof item.error === "string" ? item.error : pretty(item.error)}</pre>`;
  const tools = item.tools || [];
  return html`<details open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary class="quiet">${tools.length} tools</summary>
    ${open && html`<dl>${tools.map((tool) => html`<div key=${tool.name}><dt class="mono">${tool.name}</dt><dd class="quiet">${tool.description}</dd></div>`)}</dl>`}
  </details>`;
}

function Approval({ item, actions }) {
  const [reason, setReason] = useState("");
  if (!actions?.answer || !actions.isOpen(item)) return html`<${Arguments} text=${item.arguments} />`;
  return html`<${Arguments} text=${item.arguments} />
    <div class="row">
      <button type="button" class="primary" onClick=${() => actions.answer(item, { approve: true })}>Approve</button>
      <button type="button" onClick=${() => actions.answer(item, { approve: false, reason })}>Deny</button>
      <input class="grow" placeholder="Reason for a denial" aria-label="Reason" value=${reason} onInput=${(event) => setReason(event.target.value)} />
    </div>`;
}

const ApprovalAnswer = ({ item }) => html`<p><b>${item.approve ? "Approved" : "Denied"}</b>${item.reason && html`<span class="quiet"> ${item.reason}</span>`}</p>`;

const BODIES = {
  function_call: FunctionCall,
  custom_tool_call: FunctionCall,
  function_call_output: FunctionOutput,
  custom_tool_call_output: FunctionOutput,
  mcp_call: McpCall,
  mcp_list_tools: McpTools,
  mcp_approval_request: Approval,
  mcp_approval_response: ApprovalAnswer,
  code_interpreter_call: CodeCell,
  local_shell_call_output: FunctionOutput,
  apply_patch_call_output: FunctionOutput,
  ...HOSTED,
};
