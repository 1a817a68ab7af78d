// One stored response: input, output, events, the chain it belongs to, and what to do with it.

import { apiPath, cancelResponse, getAll, getShown, remove } from "../api.js";
import { Deliveries } from "../parts/deliveries.js";
import { Inspector } from "../parts/inspector.js";
import { Items } from "../parts/items.js";
import { Waterfall, spansOf } from "../parts/waterfall.js";
import { DeleteButton, Failure, Id, Reconnecting, Skeleton, Status, Tabs, Time } from "../parts/states.js";
import { Tree } from "../parts/tree.js";
import { UsageBar } from "../parts/usage_bar.js";
import { TERMINAL, stateOf } from "../reducer.js";
import { hashOf, setParams } from "../route.js";
import { Run } from "../run.js";
import { html, useEffect, useReducer, useRef, useState } from "../vendor/preact.js";
import { SpansOfResponse } from "./agent_traces.js";

const NO_ROWS = [];

export function ResponseView({ route }) {
  const { id } = route;
  const [response, setResponse] = useState(null);
  const [input, setInput] = useState([]);
  const [error, setError] = useState(null);
  const [selected, setSelected] = useState(null);
  const [, redraw] = useReducer((count) => count + 1, 0);
  const run = useRef(null);
  const replay = useRef(null);
  const after = route.params.after === undefined ? undefined : Number(route.params.after);
  const tab = route.tab || "output";

  useEffect(() => {
    const stops = new AbortController();
    (async () => {
      try {
        const stored = await getShown(id, stops.signal);
        setResponse(stored);
        setInput(await getAll(apiPath`responses/${id}/input_items`, { order: "asc" }, stops.signal));
        if (stored.background) {
          run.current = new Run(null, redraw);
          run.current.isReplay = TERMINAL.has(stored.status);
          run.current.follow(id, -1);
        }
      } catch (failure) {
        if (failure.name !== "AbortError") setError(failure);
      }
    })();
    return () => {
      stops.abort();
      run.current?.close();
    };
  }, [id]);

  // A replay is a second stream, next to the first one, which has built the items.
  useEffect(() => {
    if (after === undefined || !response?.background) return undefined;
    const again = new Run(null, redraw);
    replay.current = again;
    again.isReplay = true;
    again.follow(id, after);
    return () => {
      again.close();
      replay.current = null;
    };
  }, [id, after, response?.background]);

  if (error) return html`<div class="page"><header class="bar"><a class="back" href=${hashOf({ view: "responses" })}>Responses</a><h1><${Id} id=${id} /></h1></header><${Failure} error=${error} /></div>`;
  if (!response) return html`<div class="page"><${Skeleton} /></div>`;
  const live = run.current && run.current.state.response ? run.current : null;
  const state = live ? live.state : stateOf(response);
  const current = state.response;
  const shown = (after !== undefined && replay.current) || live;
  const deleted = async () => {
    await remove(apiPath`responses/${id}`);
    location.hash = hashOf({ view: "responses" });
  };
  return html`<div class="playground inspects ${shown?.rows.length ? "" : "idle"}">
    <section class="main">
      <header class="bar">
        <h1><${Id} id=${id} /></h1>
        <${Status} status=${current.status} />
        <span class="grow"></span>
        ${!TERMINAL.has(current.status) && html`<button onClick=${() => cancelResponse(id).then(setResponse, setError)}>Cancel the run</button>`}
        <a class="button" href=${hashOf({ view: "playground", params: { from: id } })}>Continue</a>
        <${DeleteButton} what=${id} onDelete=${deleted} />
      </header>
      <p class="facts quiet">
        <span>${current.model}</span><${Time} at=${current.created_at} />
        ${current.conversation && html`<span class="row">in <${Id} id=${current.conversation.id} href=${hashOf({ view: "conversations", id: current.conversation.id })} /></span>`}
        ${current.previous_response_id && html`<span class="row">follows <${Id} id=${current.previous_response_id} href=${hashOf({ view: "responses", id: current.previous_response_id })} /></span>`}
      </p>
      <${Tabs} label="Parts of the response" names=${current.background ? ["output", "tree", "trace", "webhooks"] : ["output", "tree", "trace"]} current=${tab} onChange=${(name) => (location.hash = hashOf({ view: "responses", id, tab: name, params: route.params }))}>
        ${tab === "output" &&
        html`<div class="turns">
          <${Items} items=${input} />
          <${Items} items=${state.items} meta=${state.meta} running=${live?.running} selected=${selected} onSelect=${setSelected} tools=${current.tools} model=${current.model} />
          <${Reconnecting} run=${live} />
          ${(current.error || live?.failure) && html`<${Failure} error=${current.error || live.failure} />`}
          <${UsageBar} usage=${current.usage} />
        </div>`}
        ${tab === "tree" && html`<${Tree} id=${id} />`}
        ${tab === "webhooks" && html`<${Deliveries} id=${id} ended=${TERMINAL.has(current.status)} />`}
        ${tab === "trace" && html`<${Waterfall} ...${spansOf(state, live)} /><${SpansOfResponse} id=${id} />`}
      <//>
    </section>
    <${Inspector} 
      rows=${shown?.rows || NO_ROWS}
      startedAt=${shown?.isReplay ? undefined : shown?.startedAt}
      response=${current}
      selected=${selected}
      onSelect=${setSelected}
      waits="Only a response that runs in the background stores its events."
      replay=${response.background && { after, start: (number) => setParams({ after: number }), clear: () => setParams({ after: undefined }) }}
    />
  </div>`;
}
