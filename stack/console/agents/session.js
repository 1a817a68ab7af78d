// One session, live: its turns, what it waits for, and a box to steer it.

import { apiPath } from "../api.js";
import { count, shortId } from "../format.js";
import { useFollowEnd } from "../parts/follow_end.js";
import { JsonTree } from "../parts/json_tree.js";
import { DeleteButton, Failure, Id, Skeleton, Status, Time } from "../parts/states.js";
import { hashOf } from "../route.js";
import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "../vendor/preact.js";
import { erase, userMessage } from "./api.js";
import { useArtifacts } from "./artifacts.js";
import { LiveSession } from "./live_session.js";
import { MessageBox } from "./message_box.js";
import { ObjectBar } from "./section_bar.js";
import { waitingName } from "./subagent.js";
import { Timeline } from "./timeline.js";
import { Waiting } from "./waiting.js";
import { Workspace } from "./workspace.js";

const SLACK_PX = 60;

function useLiveSession(id) {
  const [, redraw] = useReducer((turn) => turn + 1, 0);
  const live = useRef(null);
  live.current ||= new LiveSession(id, redraw);
  useEffect(() => {
    live.current.start();
    return () => live.current.close();
  }, []);
  return live.current;
}

export function Session({ route }) {
  const { id } = route;
  const live = useLiveSession(id);
  const { state } = live;
  const { session } = state;
  const [error, setError] = useState(null);
  const { box, content, follows, scrolled } = useFollowEnd(SLACK_PX);
  const anchor = useRef(null);
  const ended = [...state.turns.values()].filter(({ completed_at: at }) => at).length;
  const artifacts = useArtifacts(id, ended, Boolean(session && session.environment?.type !== "none"));
  const works = ["in_progress", "requires_action"].includes(session?.status);

  // What its reader looks at stays where it is when items come before it.
  useLayoutEffect(() => {
    const shown = anchor.current && content.current.querySelector(`[data-item="${CSS.escape(anchor.current.id)}"]`);
    anchor.current = null;
    if (shown) box.current.scrollTop += shown.getBoundingClientRect().top - box.current.dataset.top;
  }, [state.items[0]?.id]);
  const page = (load) => async () => {
    const first = content.current.querySelector("[data-item]");
    if (first && load === "showEarlier") {
      follows.current = false;
      anchor.current = { id: first.dataset.item };
      box.current.dataset.top = first.getBoundingClientRect().top;
    }
    try {
      setError(null);
      if (load === "showNewest") follows.current = true;
      await live[load]();
    } catch (failure) {
      setError(failure);
    }
  };
  const cancel = () => live.send([{ type: "agent.session.input.cancel" }]).then(() => setError(null), setError);
  const deleted = async () => {
    live.close();
    await erase(apiPath`agents/sessions/${id}`);
    location.hash = hashOf({ view: "agents", id: "sessions" });
  };
  const model = session?.agent.name || session?.agent.model;
  return html`<div class="main agents session">
    <${ObjectBar} section="sessions" title=${html`<${Id} id=${id} />`}>
      ${session && html`<${Status} status=${session.status} word=${session.status === "requires_action" ? "waits for you" : session.status} />`}
      <span class="grow"></span>
      ${works && html`<button onClick=${cancel}>Cancel the turn</button>`}
      ${session && !works && html`<${DeleteButton} what=${shortId(id)} onDelete=${deleted} />`}
    <//>
    ${session && html`<${Facts} session=${session} environment=${state.environment} />`}
    <div class="turns" ref=${box} onScroll=${scrolled} tabindex="0" role="region" aria-label="Timeline"><div ref=${content}>
      ${!session && !live.failure && html`<${Skeleton} />`}
      ${!session && live.failure && html`<${Failure} error=${live.failure} />`}
      ${state.hasEarlier && html`<button class="more" onClick=${page("showEarlier")}>Earlier items</button>`}
      ${session && html`<${Timeline} live=${live} artifacts=${artifacts} model=${model} />`}
      ${!state.isAtEnd && html`<div class="row"><button onClick=${page("showLater")}>Later items</button><button onClick=${page("showNewest")}>Newest items</button></div>`}
      ${((session?.error && !hasFailedTurn(state)) || state.error) && html`<div class="failure" role="alert"><b>${session?.error || state.error.message}</b><div class="quiet">The next message begins a new turn.</div></div>`}
    </div></div>
    ${live.tries > 0 && html`<div class="notice" role="status"><b>The connection broke off.</b> The session goes on without it. Asking for what followed again, try ${live.tries}.</div>`}
    ${session && live.failure && html`<${Failure} error=${live.failure} />`}
    ${error && html`<${Failure} error=${error} />`}
    ${session && html`<${Waiting} actions=${session.required_actions || []} nameOf=${(action) => waitingName(action, state)} onAnswer=${(action, event) => live.answer(action, event)} /><${Steer} id=${id} live=${live} works=${works} onSent=${() => (follows.current = true)} />`}
  </div>`;
}

/** The error of the session is then that of its last turn, which is in sight. */
const hasFailedTurn = ({ turns, items }) => Boolean(turns.get(items.at(-1)?.turn_id)?.error);

function Facts({ session, environment }) {
  const { agent, metadata } = session;
  const place = { ...session.environment, ...environment };
  const facts = Object.keys(metadata || {}).length;
  return html`<div class="facts quiet">
    <span class="row">agent ${agent.name || ""} <${Id} id=${agent.id} href=${hashOf({ view: "agents", id: agent.id })} /></span>
    <span>${agent.model}</span><span>begun <${Time} at=${session.created_at} /></span>
    ${session.usage && html`<span class="tabular">${count(session.usage.total_tokens)} tokens</span>`}
    ${place.type !== "none" && html`<${Workspace} environment=${place} />`}
    <details><summary>Details</summary><${JsonTree} value=${facts ? { metadata, agent } : { agent }} open=${1} /></details>
  </div>`;
}

const DRAFT = "stack.session-draft.";

/** A message to a session: a new turn, or a part of the one that runs. It is sent once, also after a lost answer. */
function Steer({ id, live, works, onSent }) {
  const [text, setText] = useState(() => sessionStorage.getItem(DRAFT + id) || "");
  const [error, setError] = useState(null);
  const [waits, setWaits] = useState(false);
  const key = useRef("");
  const write = (next) => {
    key.current = "";
    setText(next);
    if (next) sessionStorage.setItem(DRAFT + id, next);
    else sessionStorage.removeItem(DRAFT + id);
  };
  const send = async () => {
    setWaits(true);
    setError(null);
    key.current ||= crypto.randomUUID();
    try {
      onSent();
      await live.send([{ type: "agent.session.input.message", input: [userMessage(text)] }], key.current);
      write("");
    } catch (failure) {
      setError(failure);
    }
    setWaits(false);
  };
  return html`${error && html`<${Failure} error=${error} />`}
    <${MessageBox} label="Message" verb=${works ? "Steer" : "Send"} placeholder=${works ? "Steer: the agent reads it while it works…" : "Begin the next turn…"} text=${text} onText=${write} isBusy=${waits} onSend=${send} />`;
}
