// The bodies of the cards of OpenAI's own tools, and of what a card does not know.

import { html } from "../vendor/preact.js";
import { Part } from "./content.js";
import { FunctionForm } from "./function_form.js";
import { JsonTree } from "./json_tree.js";
import { Output } from "./lane.js";

function WebSearch({ item }) {
  const action = item.action || {};
  const words =
    action.type === "open_page" ? action.url : action.type === "find_in_page" ? `“${action.pattern}” in ${action.url}` : action.query || (action.queries || []).join(", ");
  return html`<p><span class="quiet">${(action.type || "search").replace(/_/g, " ")}</span> ${words}</p>
    ${(action.sources || []).length > 0 &&
    html`<ul class="sources">${action.sources.map((source) => html`<li key=${source.url} class="mono small">${source.url}</li>`)}</ul>`}`;
}

function FileSearch({ item }) {
  return html`<p class="quiet">${(item.queries || []).join(" · ")}</p>
    ${item.error?.message && html`<p class="bad">${item.error.message}</p>`}
    ${(item.results || []).map(
      (result, index) => html`<details key=${index}><summary><b>${result.filename}</b> <span class="quiet tabular">${result.score?.toFixed(2)}</span></summary><${Output} text=${result.text || ""} /></details>`,
    )}`;
}

const ShellCall = ({ item, running, actions }) =>
  html`<${Output} label="commands" text=${(item.action?.commands || [item.action?.command].flat()).filter(Boolean).join("\n")} />
    ${!running && actions?.answer && actions.isOpen(item) && html`<${FunctionForm} item=${item} onAnswer=${(output) => actions.answer(item, output)} />`}`;

export const Unknown = ({ item }) => html`<${JsonTree} value=${item} open=${1} />`;

const MADE = { png: "image/png", jpeg: "image/jpeg", jpg: "image/jpeg", webp: "image/webp" };

const GeneratedPicture = ({ item }) =>
  html`${item.revised_prompt && html`<p class="quiet">${item.revised_prompt}</p>`}
    ${item.result && html`<img class="attached" src=${`data:${MADE[item.output_format] || "image/png"};base64,${item.result}`} alt=${item.revised_prompt || "picture that the model asked for"} />`}`;

const ShellOutput = ({ item }) =>
  [item.output].flat().map((each, index) =>
    typeof each === "string"
      ? html`<${Output} key=${index} text=${each} />`
      : html`<div key=${index}>
          ${each?.stdout && html`<${Output} text=${each.stdout} label="output" />`}${each?.stderr && html`<div class="bad"><${Output} text=${each.stderr} label="errors" /></div>`}
          ${each?.outcome && html`<p class="quiet small">${each.outcome.type === "exit" ? `exit code ${each.outcome.exit_code}` : each.outcome.type}</p>`}
        </div>`,
  );

const PatchCall = ({ item, running, actions }) =>
  html`<p><span class="quiet">${(item.operation?.type || "").replace(/_/g, " ")}</span> <span class="mono">${item.operation?.path}</span></p>
    ${item.operation?.diff && html`<${Output} text=${item.operation.diff} label="patch" />`}
    ${!running && actions?.answer && actions.isOpen(item) && html`<${FunctionForm} item=${item} onAnswer=${(output) => actions.answer(item, output)} />`}`;

const ComputerCall = ({ item }) =>
  html`<ul class="small">${(item.actions || [item.action]).filter(Boolean).map(({ type, ...rest }, index) => html`<li key=${index}><b>${type}</b> <span class="mono quiet">${Object.keys(rest).length ? JSON.stringify(rest) : ""}</span></li>`)}</ul>`;

const ComputerOutput = ({ item }) => (item.output ? html`<${Part} part=${item.output} />` : null);

const FoundTools = ({ item }) => html`<ul class="small">${(item.tools || []).map((tool, index) => html`<li key=${index}><span class="mono">${tool.name || tool.server_label || tool.type}</span> <span class="quiet">${tool.description || ""}</span></li>`)}</ul>`;

const Reference = ({ item }) => html`<p class="mono quiet">${item.id}</p>`;

/** Bodies by the type of the item. */
export const HOSTED = {
  web_search_call: WebSearch,
  file_search_call: FileSearch,
  local_shell_call: ShellCall,
  shell_call: ShellCall,
  shell_call_output: ShellOutput,
  apply_patch_call: PatchCall,
  image_generation_call: GeneratedPicture,
  computer_call: ComputerCall,
  computer_call_output: ComputerOutput,
  tool_search_output: FoundTools,
  item_reference: Reference,
};
