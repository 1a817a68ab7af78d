// The list of chats: grouped by day, searched, and what one does with a chat.

import { changeChat, chatOf, deleteChat, groupByDay, listChats, paramsOf, searchChats } from "../chats.js";
import { exportJson, exportMarkdown } from "../exports.js";
import { hashOf } from "../route.js";
import { html, useCallback, useEffect, useRef, useState } from "../vendor/preact.js";
import { Icon } from "./icons.js";
import { ConfirmButton, Failure, Skeleton } from "./states.js";

const SEARCH_PAUSE_MS = 250;

/** Chats that are loaded: {chats, after, error, more, reload, put(chat), drop(id)}. */
export function useChats() {
  const [state, setState] = useState({ chats: null, after: null, error: null });
  const load = useCallback(async (after) => {
    try {
      const page = await listChats(after);
      setState((old) => ({ chats: merge(after ? old.chats : [], page.chats), after: page.after, error: null }));
    } catch (error) {
      setState((old) => ({ ...old, chats: old.chats || [], error }));
    }
  }, []);
  useEffect(() => void load(), []);
  return {
    ...state,
    more: state.after && (() => load(state.after)),
    reload: () => load(),
    put: (chat) => setState((old) => ({ ...old, chats: merge(old.chats || [], [chat]) })),
    drop: (id) => setState((old) => ({ ...old, chats: old.chats.filter((chat) => chat.id !== id) })),
  };
}

const merge = (chats, added) => [...new Map([...chats, ...added].map((chat) => [chat.id, chat])).values()];

/** `current` is the id of the chat in sight; `onDeleted(id)` is called after its end on the server. */
export function ChatList({ list, current, onNew, onDeleted, onClose }) {
  const [text, setText] = useState("");
  const [hits, setHits] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    setError(null);
    if (!text.trim()) return void setHits(null);
    const stops = new AbortController();
    const timer = setTimeout(
      () => searchChats(text.trim(), stops.signal).then((found) => !stops.signal.aborted && setHits(found), (failure) => failure.name !== "AbortError" && setError(failure)),
      SEARCH_PAUSE_MS,
    );
    return () => {
      clearTimeout(timer);
      stops.abort();
    };
  }, [text]);
  const row = (chat) => html`<${Row} key=${chat.id} chat=${chat} isCurrent=${chat.id === current} list=${list} onDeleted=${onDeleted} />`;
  const problem = error || list.error;
  return html`<nav class="chats" aria-label="Chats">
    <div class="row wrap">
      <button class="grow" onClick=${onNew}><${Icon} name="plus" /> New chat</button>
      <${Import} onDone=${(made) => made.forEach((conversation) => list.put(chatOf(conversation)))} />
      <button class="plain narrow-only" aria-label="Close the list" onClick=${onClose}><${Icon} name="close" /></button>
    </div>
    <input type="search" data-search placeholder="Search chats" aria-label="Search chats" value=${text} onInput=${(event) => setText(event.target.value)} />
    <div class="rows">
      ${problem && problem.code !== "not_configured" && problem.status !== 401 && html`<${Failure} error=${problem} onRetry=${list.reload} />`}
      ${hits
        ? html`<p class="quiet small" role="status">${hits.length ? `${hits.length} found` : "No chat has these words."}</p><ul>${hits.map(row)}</ul>`
        : list.chats
          ? groupByDay(list.chats).map(({ name, chats }) => html`<section key=${name} aria-label=${name}><h2>${name}</h2><ul>${chats.map(row)}</ul></section>`)
          : html`<${Skeleton} rows=${4} />`}
      ${!hits && list.chats?.length === 0 && !problem && html`<p class="quiet small">Chats appear here. They are stored on this server, and every browser with the same key has them. Those of other pages can be imported.</p>`}
      ${!hits && list.more && html`<button class="more" onClick=${list.more}>Older chats</button>`}
    </div>
  </nav>`;
}

/** A button that takes a file of chats, of this page or of another; it says how far it is, and what went wrong. */
function Import({ onDone }) {
  const [state, setState] = useState("");
  const [error, setError] = useState("");
  const chooser = useRef(null);
  const take = async ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    setError("");
    setState("reading…");
    try {
      const { importChats } = await import("../imports.js");
      onDone(await importChats(file, (done, all) => setState(`${done} of ${all}`)));
    } catch (failure) {
      setError(failure.message);
    }
    target.value = "";
    setState("");
  };
  return html`<input ref=${chooser} type="file" accept=".json,application/json" hidden aria-hidden="true" tabindex="-1" data-import onChange=${take} />
    <button class="plain" title="Import chats from a JSON file" aria-label="Import chats" disabled=${Boolean(state)} onClick=${() => chooser.current.click()}>${state ? html`<span class="small tabular" role="status">${state}</span>` : html`<${Icon} name="upload" />`}</button>
    ${error && html`<p class="bad small wide" role="alert">${error}</p>`}`;
}

function Row({ chat, isCurrent, list, onDeleted }) {
  const [open, setOpen] = useState(false);
  const [renames, setRenames] = useState(false);
  const [error, setError] = useState(null);
  const menu = useRef(null);
  const attempt = (work) => () => work().then(() => setError(null), setError);
  const change = (changes) => changeChat(chat.id, changes).then(list.put);
  const rename = (title) => {
    setRenames(false);
    if (title && title !== chat.title) attempt(() => change({ title }))();
  };
  const deleted = async () => {
    await deleteChat(chat);
    list.drop(chat.id);
    onDeleted(chat.id);
  };
  return html`<li class=${isCurrent ? "on" : ""}>
    <div class="row">
      ${renames
        ? html`<${Rename} title=${chat.title} onDone=${rename} />`
        : html`<a class="grow" href=${hashOf({ view: "playground", params: paramsOf(chat) })} title=${chat.title} aria-current=${isCurrent ? "page" : undefined}>
            <span class="clip">${chat.title}</span>${chat.words && html`<span class="clip quiet small">${chat.words}</span>`}</a>`}
      <button class="plain more-of" aria-expanded=${open} aria-label="Actions for ${chat.title}" ref=${menu} onClick=${() => setOpen(!open)}><${Icon} name="more" /></button>
    </div>
    ${open &&
    html`<div class="row wrap actions" onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), setOpen(false), menu.current.focus())}>
      <button class="plain" onClick=${() => (setRenames(true), setOpen(false))}>Rename</button>
      <button class="plain" onClick=${attempt(() => change({ pinned: chat.isPinned ? null : "true" }))}>${chat.isPinned ? "Unpin" : "Pin"}</button>
      <button class="plain" onClick=${attempt(() => exportMarkdown(chat))}>Markdown</button>
      <button class="plain" onClick=${attempt(() => exportJson(chat))}>JSON</button>
      <${ConfirmButton} verb="Delete" what="this chat and its answers" onConfirm=${deleted} />
    </div>`}
    ${error && html`<p class="bad small" role="alert">${error.message}</p>`}
  </li>`;
}

function Rename({ title, onDone }) {
  const box = useRef(null);
  useEffect(() => box.current.select(), []);
  const submit = (event) => {
    event.preventDefault();
    if (box.current) onDone(box.current.value.trim()); // leaving the page of a renamed chat blurs it once more
  };
  return html`<form class="grow" onSubmit=${submit}>
    <input ref=${box} aria-label="Title" maxlength="200" defaultValue=${title} onBlur=${submit} onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), onDone(""))} />
  </form>`;
}
