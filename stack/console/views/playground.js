// The Playground: the list of chats, and one thread, or two that answer the same question, with settings and events.

import { ChatRecord, readDraft, saveDraft } from "../chats.js";
import { ChatList, useChats } from "../parts/chat_list.js";
import { Composer } from "../parts/composer.js";
import { useFollowEnd } from "../parts/follow_end.js";
import { Icon } from "../parts/icons.js";
import { Inspector } from "../parts/inspector.js";
import { Modes } from "../parts/modes.js";
import { Settings } from "../parts/settings_panel.js";
import { Failure, Skeleton } from "../parts/states.js";
import { Turn } from "../parts/turn.js";
import { Welcome } from "../parts/welcome.js";
import { hashOf, parseHash, setParams } from "../route.js";
import { loadSettings, readPreference, readPresets, savePreference, saveSettings } from "../settings.js";
import { Thread, attachmentsOf, questionOf, userMessage } from "../thread.js";
import { HOSTED_TOOLS, useTools } from "../tools.js";
import { html, useEffect, useReducer, useRef, useState } from "../vendor/preact.js";

const NO_ROWS = [];
/** The params of the URL that name the last response of each thread. */
const PARAMS = ["from", "with"];
const EMPTY = { text: "", parts: [] };
const isNarrow = () => matchMedia("(max-width: 1023px)").matches;

/** The URL names the latest stored response, so that a reload shows it, or goes on with it; the view stays as it is. */
function rememberInUrl(param, id) {
  const route = parseHash();
  if (route.view !== "playground" || (route.params[param] || "") === id) return;
  history.replaceState(null, "", hashOf({ ...route, params: { ...route.params, [param]: id } }));
}

/** Both threads, made once, whose turns are branches of one chat. */
function useThreads(onChange, onChat) {
  const threads = useRef(null);
  if (!threads.current) {
    const record = new ChatRecord(onChat);
    threads.current = PARAMS.map((param) => new Thread({ onChange, record, onShown: (id) => rememberInUrl(param, id) }));
  }
  useEffect(() => () => threads.current.forEach((thread) => thread.close()), []);
  return threads.current;
}

export function Playground({ route, models, lacksModels }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const list = useChats();
  const threads = useThreads(redraw, (chat) => (list.put(chat), redraw()));
  const [first, second] = threads;
  const { compare } = route.params;
  const shown = compare ? threads : [first];
  const [settings, setSettings] = useState(loadSettings);
  const tools = useTools();
  const [draft, setDraft] = useState(EMPTY);
  const [waiting, setWaiting] = useState(null); // a question that was sent before the models were known
  const place = useRef(null);
  const [side, setSide] = useState(() => (isNarrow() ? "" : readPreference("side", "")));
  const [showsChats, setShowsChats] = useState(() => !isNarrow() && readPreference("chats", true));
  const [active, setActive] = useState(0);
  const [selected, setSelected] = useState(null);
  const others = { ...settings, model: compare || settings.model };
  const settingsOf = (thread) => (thread === second ? others : settings);
  const { record } = first;
  const chats = models.filter((model) => !/embed|minilm/i.test(model.id));

  const change = (next) => {
    setSettings(next);
    saveSettings(next);
  };
  const toggleSide = (name) => {
    const next = side === name ? "" : name;
    setSide(next);
    if (!isNarrow()) savePreference("side", next);
  };
  const toggleChats = () => {
    if (!isNarrow()) savePreference("chats", !showsChats);
    setShowsChats(!showsChats);
  };
  const write = (next) => {
    setDraft(next);
    if (next.editing === undefined) saveDraft(first.shown, next.text);
  };

  useEffect(() => {
    if (chats.length && !models.some((model) => model.id === settings.model)) change({ ...settings, model: chats[0].id });
  }, [models]);
  useEffect(() => {
    PARAMS.forEach((param, index) => {
      const thread = threads[index];
      const id = (index === 0 || compare) && (route.params[param] || (index === 0 && route.params.chat));
      if (id && id !== thread.shown) thread.load(id);
      else if (!id && (thread.shown || (index === 1 && !compare))) thread.reset();
    });
    if (!first.shown && !first.turns.length) record.take(null);
    const from = route.params.from || "";
    if (place.current !== from) setDraft({ ...EMPTY, text: readDraft(from) });
    place.current = from;
    setSelected(null);
    if (isNarrow()) setShowsChats(false);
  }, [route]);
  useEffect(() => {
    if (!waiting || !settings.model) return;
    setWaiting(null);
    submit(waiting.text, waiting.parts);
  }, [waiting, settings.model]);
  useEffect(() => {
    const stop = (event) => event.key === "Escape" && threads.forEach((thread) => thread.isRunning && thread.last.run.stop());
    addEventListener("keydown", stop);
    return () => removeEventListener("keydown", stop);
  }, []);

  const attempt = (thread, work) => {
    try {
      work();
      return true;
    } catch (error) {
      thread.failure = error;
      redraw();
      return false;
    }
  };
  const send = (input, at) => shown.map((thread) => attempt(thread, () => thread.send(settingsOf(thread), input, at))).every(Boolean);
  const submit = (text, parts) => {
    if (!settings.model && !models.length) return setWaiting({ text, parts });
    if (!send([userMessage(text, parts)], draft.editing)) return;
    saveDraft(first.shown, "");
    setDraft(EMPTY);
    setSelected(null);
  };
  const askExample = (text, tool) => {
    const vectorStoreIds = settings.vectorStoreIds || (tool === "file_search" ? tools.stores[0].id : "");
    if (tool) change({ ...settings, tools: [...new Set([...settings.tools, tool])], vectorStoreIds });
    setWaiting({ text, parts: [] });
  };
  const startNew = () => {
    threads.forEach((thread) => thread.reset());
    record.take(null);
    setParams({ from: "", with: "", chat: "" });
  };
  const edit = (thread, index) => {
    const { input } = thread.turns[index];
    setDraft({ text: questionOf(input), parts: attachmentsOf(input), editing: index });
  };
  const toggleCompare = () => {
    setActive(0);
    setParams(compare ? { compare: "", with: "" } : { compare: settings.model || "1", with: first.shown });
  };
  const column = (thread, index) => html`<${Column}
    key=${index}
    thread=${thread}
    name=${compare ? ["Left", "Right"][index] : "Chat"}
    selected=${selected}
    onSelect=${(item) => (setActive(index), setSelected(item))}
    onAnswer=${(item, given) => attempt(thread, () => thread.answer(settingsOf(thread), item, given))}
    onRetry=${(turn) => attempt(thread, () => thread.send(settingsOf(thread), turn.input, thread.turns.indexOf(turn)))}
    onEdit=${(turn) => edit(thread, thread.turns.indexOf(turn))}
    empty=${html`<${Welcome} tools=${tools} lacksModels=${lacksModels} models=${models} model=${settingsOf(thread).model} onAsk=${askExample} onUse=${(model) => change({ ...settings, model })} />`}
    >${compare &&
    html`<div class="row column-head"><${ModelMenu} label="Model ${["left", "right"][index]}" models=${chats} value=${settingsOf(thread).model} onChange=${(model) => (index ? setParams({ compare: model }) : change({ ...settings, model }))} /></div>`}<//>`;

  return html`<div class="playground ${showsChats ? "lists" : ""} ${side ? "inspects" : ""}">
    ${showsChats && html`<${ChatList} list=${list} current=${record.chat?.id} onNew=${startNew} onDeleted=${(id) => id === record.chat?.id && startNew()} onClose=${toggleChats} />`}
    <section class="main" aria-label="Playground">
      <header class="bar">
        <${Tool} name="Chats" icon="conversations" isOn=${showsChats} onClick=${toggleChats} />
        <h1 class="clip">${record.chat?.title || "Playground"}</h1>
        <span class="grow"></span>
        <${Modes} current="responses" />
        ${!compare && html`<${ModelMenu} label="Model" models=${chats} value=${settings.model} onChange=${(model) => change({ ...settings, model })} />`}
        ${!showsChats && html`<${Tool} name="New chat" icon="plus" onClick=${startNew} />`}
        <${Tool} name="Compare" icon="compare" isOn=${Boolean(compare)} onClick=${toggleCompare} />
        <${Tool} name="Settings" icon="settings" isOn=${side === "settings"} onClick=${() => toggleSide("settings")} />
        <${Tool} name="Inspect" icon="traces" isOn=${side === "inspector"} onClick=${() => toggleSide("inspector")} />
      </header>
      <div class="columns">${shown.map(column)}</div>
      <${Composer}
        draft=${draft}
        onDraft=${write}
        running=${shown.some((thread) => thread.isRunning)}
        onStop=${() => shown.forEach((thread) => thread.isRunning && thread.last.run.stop())}
        onSend=${submit}
        tools=${namesOfTools(settings)}
        onTools=${() => side !== "settings" && toggleSide("settings")}
        preset=${presetOf(settings, (instructions) => change({ ...settings, instructions }))}
        onCancelEdit=${() => setDraft({ ...EMPTY, text: readDraft(first.shown) })}
      />
    </section>
    ${side === "settings" && html`<${Settings} settings=${settings} tools=${tools} onChange=${change} onClose=${() => toggleSide("settings")} />`}
    ${side === "inspector" && html`<${Watched} thread=${threads[compare ? active : 0]} selected=${selected} onSelect=${setSelected} onClose=${() => toggleSide("inspector")} />`}
  </div>`;
}

/** A button of the bar: its word shows where there is room for it. */
const Tool = ({ name, icon, isOn, onClick }) =>
  html`<button class="tool" aria-label=${name} title=${name} aria-pressed=${isOn} onClick=${onClick}><${Icon} name=${icon} /><span class="roomy-only">${name}</span></button>`;

/** The tools that are on, by their names. */
const namesOfTools = ({ tools, servers }) => [...tools.map((type) => HOSTED_TOOLS.find(([each]) => each === type)?.[1] || type), ...servers];

function presetOf({ instructions }, onChoose) {
  const presets = readPresets();
  const names = Object.keys(presets).sort();
  return { names, current: names.find((name) => presets[name] === instructions) || "", isOwn: Boolean(instructions), choose: (name) => onChoose(presets[name] || "") };
}

const ModelMenu = ({ label, models, value, onChange }) =>
  html`<select class="model" aria-label=${label} value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${optionsOf(models.filter((model) => model.owned_by !== "agents"))}
    ${models.some((model) => model.owned_by === "agents") && html`<optgroup label="Agents">${optionsOf(models.filter((model) => model.owned_by === "agents"))}</optgroup>`}
  </select>`;

const optionsOf = (models) => models.map((model) => html`<option key=${model.id} value=${model.id}>${model.id.replace(/^agent\//, "")}</option>`);

/** The events of the turn whose item is selected, else of the last one. */
function Watched({ thread, selected, onSelect, onClose }) {
  const owner = selected && thread.turns.find((turn) => turn.run.state.items.some((item) => item?.id === selected));
  const run = (owner || thread.last)?.run;
  return html`<${Inspector} rows=${run?.rows || NO_ROWS} startedAt=${run?.isReplay ? undefined : run?.startedAt} request=${run?.request} response=${run?.state.response} selected=${selected} onSelect=${onSelect} onClose=${onClose} />`;
}

function Column({ thread, name, selected, onSelect, onAnswer, onRetry, onEdit, empty, children }) {
  const { box, content, follows, scrolled } = useFollowEnd(60);
  const { turns, last } = thread;
  useEffect(() => void (follows.current = true), [last]);
  const later = thread.isRunning ? 0 : thread.laterTurns;
  return html`<div class="column" role="group" aria-label=${name}>
    ${children}
    <div class="turns" ref=${box} onScroll=${scrolled} tabindex="-1"><div ref=${content}>
      ${thread.isLoading && html`<${Skeleton} />`}
      ${!turns.length && !thread.failure && !thread.isLoading && empty}
      ${thread.earlier.length > 0 && html`<button class="more" onClick=${() => thread.loadEarlier()}>${thread.earlier.length} earlier ${thread.earlier.length === 1 ? "turn" : "turns"}</button>`}
      ${turns.map(
        (turn, index) => html`<${Turn}
          key=${turn.run.state.response?.id || index}
          turn=${turn}
          index=${index}
          thread=${thread}
          selected=${selected}
          onSelect=${onSelect}
          actions=${turn === last ? { answer: onAnswer, isOpen: (item) => thread.isOpen(item) } : null}
          onRetry=${() => onRetry(turn)}
          onEdit=${() => onEdit(turn)}
        />`,
      )}
      ${thread.failure && html`<${Failure} error=${thread.failure} />`}
      ${later > 0 && html`<button class="more" onClick=${() => thread.showLater()}>${later} later ${later === 1 ? "turn" : "turns"}</button>`}
    </div></div>
  </div>`;
}
