// A better model by one click: what this machine can run, the fetch of it with its progress, and what went wrong.

import { gigabytes } from "../format.js";
import { useLocalModels } from "../local_models.js";
import { html, useRef } from "../vendor/preact.js";
import { Failure, Status } from "./states.js";

/** `models` are those that the server lists; `onUse(id)` chooses one. */
export function ModelOffer({ wanted, models, current, onUse }) {
  const state = useLocalModels(wanted);
  const { library, pull, error } = state;
  if (!wanted || (!library && !error)) return null;
  const served = new Set(models.map((model) => model.id));
  const chats = (library?.models || []).filter((model) => model.kind.startsWith("chat"));
  const best = chats.find((model) => model.is_suggested);
  const offers = best && !served.has(best.name) && !state.isActive;
  return html`<section class="offer" aria-label="Models of this machine">
    ${state.isActive && html`<${Progress} pull=${pull} onCancel=${state.cancel} />`}
    ${pull?.status === "completed" && pull.model !== current && served.has(pull.model) &&
    html`<div class="row wrap"><span><b>${pull.model}</b> is here.</span><button class="primary" onClick=${() => onUse(pull.model)}>Use it</button></div>`}
    ${pull?.status === "failed" && html`<div class="failure" role="alert"><b>${pull.model} could not be fetched.</b><span>${pull.error}</span><button onClick=${() => state.begin(pull.model)}>Try again</button></div>`}
    ${pull?.status === "cancelled" && html`<p class="quiet small">The fetch of ${pull.model} was cancelled. What was fetched stays, and the next try goes on there.</p>`}
    ${offers &&
    html`<div class="row wrap"><span>This machine runs a better model: <b>${best.name}</b> <span class="quiet small">${gigabytes(best.size_bytes)} · ${best.licence}</span></span>
      <button class="primary" disabled=${Boolean(best.reason)} title=${best.reason || ""} onClick=${() => state.begin(best.name)}>Fetch it</button></div>`}
    ${error && html`<${Failure} error=${error} />`}
    ${chats.length > 0 &&
    html`<details class="small"><summary>All models that can be fetched</summary>
      <p class="quiet">${library.machine}; models may take ${gigabytes(library.memory_bytes)}, the disk has ${gigabytes(library.disk_free_bytes)} free.</p>
      <ul class="library">${chats.map((model) => html`<${Choice} key=${model.name} model=${model} isServed=${served.has(model.name)} isBusy=${state.isActive} onBegin=${state.begin} onUse=${onUse} />`)}</ul></details>`}
  </section>`;
}

function Choice({ model, isServed, isBusy, onBegin, onUse }) {
  return html`<li>
    <span><b>${model.name}</b> <span class="quiet">${gigabytes(model.size_bytes)}${model.kind.includes("vision") ? " · sees pictures" : ""} · ${model.licence}</span>
      ${model.reason && !isServed && html`<span class="quiet block">${model.reason}</span>`}</span>
    ${isServed ? html`<button onClick=${() => onUse(model.name)} aria-label="Use ${model.name}">Use</button>` : html`<button disabled=${isBusy || Boolean(model.reason)} aria-label="Fetch ${model.name}" onClick=${() => onBegin(model.name)}>Fetch</button>`}
  </li>`;
}

/** The fetch under way, with the time that is left by the speed since this page looks. */
function Progress({ pull, onCancel }) {
  const first = useRef(null);
  if (first.current?.model !== pull.model || first.current.bytes > pull.done_bytes) first.current = { model: pull.model, bytes: pull.done_bytes, at: performance.now() };
  const seconds = (performance.now() - first.current.at) / 1000;
  const rate = seconds > 2 ? (pull.done_bytes - first.current.bytes) / seconds : 0;
  const left = rate > 0 ? (pull.total_bytes - pull.done_bytes) / rate : 0;
  const verifies = pull.done_bytes >= pull.total_bytes;
  return html`<div class="pull">
    <div class="row"><${Status} status=${pull.status === "queued" ? "queued" : "running"} word=${verifies ? "verifying" : "fetching"} /><b class="clip">${pull.model}</b><span class="grow"></span><button onClick=${onCancel}>Cancel</button></div>
    <progress max=${pull.total_bytes} value=${pull.done_bytes} aria-label="Fetch of ${pull.model}"></progress>
    <p class="quiet small tabular" role="status">${gigabytes(pull.done_bytes)} of ${gigabytes(pull.total_bytes)}${left > 0 ? ` · ${left < 90 ? `${Math.ceil(left)} s` : `${Math.ceil(left / 60)} min`} left` : ""}. You can go on chatting, or close this page.</p>
  </div>`;
}
