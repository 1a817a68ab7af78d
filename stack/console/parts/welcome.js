// The first sight of the Playground: what this server can do, and something to begin with that shows it.

import { HOSTED_TOOLS, reasonOf } from "../tools.js";
import { html } from "../vendor/preact.js";
import { ModelOffer } from "./model_offer.js";

/** [tool that the example needs, question]; the first three whose tools are there are offered. */
const EXAMPLES = [
  ["code_interpreter", "Draw the first 50 primes as a spiral with Python, and show me the picture."],
  ["web_search", "What is new in Python this month? Search the web, and cite your sources."],
  ["file_search", "What do my files say about this? Search in them."],
  ["shell", "Which Linux runs in your container? Look with the shell."],
  ["", "Name three rivers of France."],
  ["", "Explain a mutex to a child."],
  ["", "Solve x² − 5x + 6 = 0 step by step, with formulas."],
];

/** `onAsk(text, tool)` sends an example with its tool switched on; `onUse(id)` chooses a model. */
export function Welcome({ tools, model, models, lacksModels, onAsk, onUse }) {
  const has = ([type]) => !type || (tools.isKnown && !reasonOf(tools, type));
  const there = HOSTED_TOOLS.filter(has);
  const absent = HOSTED_TOOLS.filter((row) => tools.isKnown && !has(row));
  if (lacksModels)
    return html`<div class="empty welcome">
      <h2>This server has no model yet</h2>
      <p>The section <code>inference</code> of its run config names none, or its upstream is away: the server's log says which.</p>
      <${ModelOffer} wanted=${tools.mayInstall} models=${models} current="" onUse=${onUse} />
    </div>`;
  return html`<div class="empty welcome">
    <h2>What do you want to know?</h2>
    ${model && html`<p>You ask <b>${model}</b>, on this server.${tools.isKnown ? (there.length ? ` It can use ${listOf(there)}.` : " It has no tools yet.") : ""}</p>`}
    <div class="examples">${EXAMPLES.filter((row) => has(row) && (row[0] !== "file_search" || tools.stores.length > 0)).slice(0, 3).map(([tool, text]) => html`<button key=${text} onClick=${() => onAsk(text, tool)}>${tool && html`<b class="small">${HOSTED_TOOLS.find(([type]) => type === tool)[1]}</b>`}<span>${text}</span></button>`)}</div>
    <${ModelOffer} wanted=${tools.mayInstall} models=${models} current=${model} onUse=${onUse} />
    ${absent.length > 0 &&
    html`<details class="small"><summary>What this server does not have yet</summary>
      <dl>${absent.map(([type, name]) => html`<div key=${type}><dt>${name}</dt><dd>${reasonOf(tools, type)}</dd></div>`)}</dl></details>`}
  </div>`;
}

const listOf = (rows) => {
  const names = rows.map(([, name]) => name);
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
};
