// The Playground: a conversation of turns, one or two panes, each with its own settings.

import { storedTurns } from "../chain.js";
import { Composer } from "../parts/composer.js";
import { useFollowEnd } from "../parts/follow_end.js";
import { Inspector } from "../parts/inspector.js";
import { Item, Items } from "../parts/items.js";
import { Modes } from "../parts/modes.js";
import { Settings } from "../parts/settings_panel.js";
import { Empty, Failure, Reconnecting, Status } from "../parts/states.js";
import { UsageBar } from "../parts/usage_bar.js";
import { openCalls } from "../reducer.js";
import { hashOf, parseHash } from "../route.js";
import { Run } from "../run.js";
import { bodyOf, loadSettings, saveSettings } from "../settings.js";
import { html, useEffect, useReducer, useRef, useState } from "../vendor/preact.js";

const NO_ROWS = [];
const EXAMPLES = ["Name three rivers of France.", "Explain a mutex to a child.", "Write a haiku about caches."];

export function Playground({ route, models }) {
  const [compare, setCompare] = useState(false);
  const [settings, setSettings] = useState(loadSettings);
  const [other, setOther] = useState(null);
  const [shared, setShared] = useState(null);
  const change = (next) => {
    setSettings(next);
    saveSettings(next);
  };
  useEffect(() => {
    const chats = models.filter((model) => !/embed|minilm/i.test(model.id));
    if (chats.length && !models.some((model) => model.id === settings.model)) change({ ...settings, model: chats[0].id });
  }, [models]);
  const toggle = () => {
    setOther({ ...settings });
    setCompare(!compare);
  };
  const pane = (name, own, set, more) =>
    html`<${Pane} key=${name} models=${models} settings=${own} onSettings=${set} from=${route.params.from} onCompare=${toggle} compare=${compare} ...${more} />`;
  if (!compare) return pane("one", settings, change, {});
  return html`<div class="panes">
    ${pane("one", settings, change, { onSent: setShared, shared: shared?.from === "two" ? shared : null, name: "one" })}
    ${pane("two", other, setOther, { onSent: setShared, shared: shared?.from === "one" ? shared : null, name: "two" })}
  </div>`;
}

/** The URL names the latest stored response, so that a reload shows it, or goes on with it; the view stays as it is. */
function rememberInUrl(id) {
  const route = parseHash();
  if (route.view !== "playground" || (route.params.from || "") === id) return;
  history.replaceState(null, "", hashOf({ ...route, params: { ...route.params, from: id } }));
}

function Pane({ models, settings, onSettings, from, onCompare, compare, onSent, shared, name }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const turns = useRef([]);
  const [failure, setFailure] = useState(null);
  const [open, setOpen] = useState(false);
  const [selected, setSelected] = useState(null);
  const [draft, setDraft] = useState({ text: "", parts: [] });
  const [inspects, setInspects] = useState(!matchMedia("(max-width: 1023px)").matches);
  const { box, content, follows, scrolled } = useFollowEnd(60);
  const last = turns.current.at(-1);

  useEffect(() => {
    if (!from) return undefined;
    let isWanted = true;
    storedTurns(from, redraw).then(
      (stored) => {
        if (!isWanted) return stored.forEach((turn) => turn.run.close());
        turns.current.forEach((turn) => turn.run.close());
        turns.current = stored;
        return redraw();
      },
      (error) => isWanted && setFailure(error),
    );
    return () => (isWanted = false);
  }, [from]);
  useEffect(() => () => turns.current.forEach((turn) => turn.run.close()), []);
  useEffect(() => {
    if (shared) send(shared.input, false);
  }, [shared]);
  useEffect(() => {
    const stop = (event) => event.key === "Escape" && turns.current.at(-1)?.run.running && turns.current.at(-1).run.stop();
    addEventListener("keydown", stop);
    return () => removeEventListener("keydown", stop);
  }, []);

  function send(input, tells = true) {
    setFailure(null);
    const previous = turns.current.findLast((turn) => turn.run.state.response?.store)?.run.state.response;
    let body;
    try {
      body = bodyOf(settings, input, previous);
    } catch (error) {
      setFailure(error);
      return false;
    }
    if (!previous && turns.current.length) body.input = [...turns.current.flatMap((turn) => [...turn.input, ...turn.run.state.items]), ...input];
    let isRemembered = compare;
    const run = new Run(body, ({ state }) => {
      if (!isRemembered && state.response?.store) {
        isRemembered = true;
        rememberInUrl(state.response.id);
      }
      redraw();
    });
    turns.current = [...turns.current, { input, run, answers: {} }];
    run.start();
    redraw();
    if (tells) onSent?.({ input, from: name, at: Date.now() });
    setSelected(null);
    follows.current = true;
    return true;
  }

  function retry(index, input) {
    turns.current.slice(index).forEach((turn) => turn.run.close());
    turns.current = turns.current.slice(0, index);
    if (input) send(input);
    else {
      rememberInUrl("");
      redraw();
    }
  }

  function edit(index) {
    const { input } = turns.current[index];
    retry(index, null);
    setDraft({ text: textOf(input), parts: [] });
  }

  /** Collect answers until all open calls of the last turn have one, then send them together. */
  function answer(item, given) {
    const turn = turns.current.at(-1);
    turn.answers[item.id] = answerItem(item, given);
    const calls = openCalls(turn.run.state.items);
    if (calls.every((call) => turn.answers[call.id])) send(calls.map((call) => turn.answers[call.id]), false);
    else redraw();
  }
  const isOpen = (item) => last && !last.run.running && openCalls(last.run.state.items).includes(item) && !last.answers?.[item.id];

  const owner = selected && turns.current.find((turn) => turn.run.state.items.some((item) => item?.id === selected));
  const shown = (owner || last)?.run;

  return html`<div class="playground ${inspects ? "inspects" : ""}">
    <section class="main" aria-label="Playground ${name || ""}">
      <header class="bar">
        <h1>Playground</h1>
        <${Modes} current="responses" />
        <select aria-label="Model" value=${settings.model} onChange=${(event) => onSettings({ ...settings, model: event.target.value })}>
          ${models.map((model) => html`<option key=${model.id} value=${model.id}>${model.id}</option>`)}
        </select>
        <button aria-expanded=${open} onClick=${() => setOpen(!open)}>Settings</button>
        <span class="grow"></span>
        ${turns.current.length > 0 && html`<button onClick=${() => retry(0, null)}>New</button>`}
        <button aria-pressed=${compare} onClick=${onCompare}>${compare ? "One pane" : "Compare"}</button>
        <button aria-pressed=${inspects} onClick=${() => setInspects(!inspects)}>Inspect</button>
      </header>
      ${open && html`<${Settings} settings=${settings} onChange=${onSettings} />`}
      <div class="turns" ref=${box} onScroll=${scrolled}><div ref=${content}>
        ${!turns.current.length &&
        !failure &&
        html`<${Empty} title="Ask the model something, or start with one of these.">
          <div class="row wrap">${EXAMPLES.map((text) => html`<button key=${text} onClick=${() => send([userMessage(text, [])])}>${text}</button>`)}</div>
        <//>`}
        ${turns.current.map(
          (turn, index) => html`<${Turn}
            key=${index}
            turn=${turn}
            selected=${selected}
            onSelect=${setSelected}
            actions=${turn === last ? { answer, isOpen } : null}
            onRetry=${() => retry(index, turn.input)}
            onEdit=${() => edit(index)}
          />`,
        )}
        ${failure && html`<${Failure} error=${failure} />`}
      </div></div>
      <${Composer}
        draft=${draft}
        onDraft=${setDraft}
        running=${last?.run.running}
        onStop=${() => last.run.stop()}
        onSend=${(text, parts) => send([userMessage(text, parts)])}
      />
    </section>
    ${inspects &&
    html`<${Inspector} rows=${shown?.rows || NO_ROWS} startedAt=${shown?.startedAt} request=${shown?.request} response=${shown?.state.response} selected=${selected} onSelect=${setSelected} />`}
  </div>`;
}

function Turn({ turn, selected, onSelect, actions, onRetry, onEdit }) {
  const { run, input } = turn;
  const { response } = run.state;
  const status = run.running ? "running" : response?.status;
  const isUser = input.every((item) => !item.type || item.type === "message");
  return html`<article class="turn">
    ${turn.followsDeleted && html`<p class="quiet small">An earlier turn was deleted.</p>`}
    ${input.map((item, index) => html`<${Item} key=${index} item=${{ type: "message", ...item }} />`)}
    <${Items} items=${run.state.items} meta=${run.state.meta} running=${run.running} selected=${selected} onSelect=${onSelect} actions=${actions} tools=${response?.tools} />
    ${run.running && !run.state.items.length && html`<div class="item"><${Waiting} run=${run} /></div>`}
    <${Reconnecting} run=${run} />
    ${(run.failure || run.state.error) && html`<${Failure} error=${run.failure || run.state.error} onRetry=${onRetry} />`}
    ${!run.running &&
    html`<footer class="row">
      ${status && status !== "completed" && html`<${Status} status=${status} word=${run.isStopped ? "stopped" : status} />`}
      ${response?.incomplete_details?.reason && html`<span class="quiet">${response.incomplete_details.reason}</span>`}
      <${UsageBar} usage=${response?.usage} firstMs=${run.firstAt && run.firstAt - run.startedAt} totalMs=${run.endedAt - run.startedAt || undefined} />
      <span class="grow"></span>
      ${isUser && html`<button class="plain" onClick=${onEdit}>Edit</button>`}<button class="plain" onClick=${onRetry}>Retry</button>
    </footer>`}
  </article>`;
}

const Waiting = ({ run }) => html`<${Status} status=${run.state.response?.status === "queued" ? "queued" : "running"} />`;

const userMessage = (text, parts) => ({ role: "user", content: [...(text ? [{ type: "input_text", text }] : []), ...parts] });

const textOf = (input) =>
  input.flatMap((item) => (typeof item.content === "string" ? [{ text: item.content }] : item.content || [])).map((part) => part.text || "").join("\n");

function answerItem(item, given) {
  if (item.type === "mcp_approval_request") return { type: "mcp_approval_response", approval_request_id: item.id, approve: given.approve, ...(given.reason && { reason: given.reason }) };
  return { type: item.type.replace(/_call$/, "_call_output"), call_id: item.call_id, output: given };
}
