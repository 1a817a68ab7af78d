// The frame of the page: rail, view of the current route, key dialog, list of shortcuts.

import { UNKNOWN, loadKey, mayListModels, mayShow } from "./access.js";
import { UNAUTHORIZED, get } from "./api.js";
import { SHORTCUTS, listenToKeys } from "./keys.js";
import { MODELS_CHANGED } from "./local_models.js";
import { Icon } from "./parts/icons.js";
import { KeyDialog } from "./parts/key_dialog.js";
import { lazy } from "./parts/lazy.js";
import { Failure } from "./parts/states.js";
import { hashOf, useRoute } from "./route.js";
import { readKey, readSession } from "./session.js";
import { completeSignIn, loadSignIn, refusalOf, takeAnswer } from "./sign_in.js";
import { html, render, useCallback, useEffect, useErrorBoundary, useRef, useState } from "./vendor/preact.js";
import { Playground } from "./views/playground.js";
import { ResponseView } from "./views/response.js";
import { Responses } from "./views/responses.js";
import { Runs } from "./views/runs.js";

/** Views that a narrow window shows at once; the others come with More. */
const FIRST = new Set(["playground", "responses", "runs", "files"]);
/** Views that show another tab, and nothing else, for another id. */
const KEEPS = new Set(["team"]);
const Decisions = lazy(async () => (await import("./views/decisions.js")).Decisions);
const VIEWS = [
  ["playground", "Play", "Playground", Playground],
  ["responses", "Responses", "Responses", Responses],
  ["runs", "Runs", "Background runs", Runs],
  ["conversations", "Conversations", "Conversations", lazy(async () => (await import("./views/conversations.js")).Conversations)],
  ["agents", "Agents", "Agents", lazy(async () => (await import("./agents/main.js")).Agents)],
  ["files", "Files", "Files and vector stores", lazy(async () => (await import("./views/files.js")).Files)],
  ["traces", "Traces", "Traces", lazy(async () => (await import("./views/traces.js")).Traces)],
  ["figures", "Figures", "Figures", lazy(async () => (await import("./views/figures.js")).Figures)],
  ["usage", "Usage", "Usage of this key", lazy(async () => (await import("./views/usage.js")).Usage)],
  ["team", "Team", "Team", lazy(async () => (await import("./views/team.js")).Team)],
];

function Rail({ views, current, onKey, onTheme, needsKey }) {
  const [open, setOpen] = useState(false);
  useEffect(() => setOpen(false), [current]);
  return html`<nav class="rail ${open ? "open" : ""}" aria-label="Views">
    ${views.map(
      ([view, label, title]) => html`<a
        key=${view}
        href=${hashOf({ view })}
        title=${title}
        class="${view === current ? "on" : ""} ${FIRST.has(view) || view === current ? "" : "rare"}"
        aria-current=${view === current ? "page" : undefined}
        ><${Icon} name=${view} /><span>${label}</span></a
      >`,
    )}
    <span class="grow"></span>
    <button class="plain narrow-rail" aria-expanded=${open} onClick=${() => setOpen(!open)}><${Icon} name="more" /><span>More</span></button>
    <button class="plain ${needsKey ? "" : "rare"}" title=${readSession() ? "Your sign-in" : "API key"} onClick=${onKey}><${Icon} name="key" /><span>${needsKey ? "Key!" : readSession() ? "Account" : "Key"}</span></button>
    <button class="plain rare" title="Light or dark" onClick=${onTheme}><${Icon} name="theme" /><span>Theme</span></button>
  </nav>`;
}

function Help({ onClose }) {
  return html`<div class="veil" onClick=${onClose}>
    <div class="dialog" role="dialog" aria-modal="true" aria-label="Keyboard shortcuts">
      <h2>Keyboard</h2>
      <table class="keys">
        ${SHORTCUTS.map(([key, effect]) => html`<tr key=${key}><th scope="row"><kbd>${key}</kbd></th><td>${effect}</td></tr>`)}
      </table>
      <div class="row end"><button autofocus onClick=${onClose}>Close</button></div>
    </div>
  </div>`;
}

/** The view of an empty hash: the Playground, or the first that a key of fewer rights may use. */
const firstOf = (views) => (views.find(([name]) => name !== "figures") || views[0])[0];

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function nextTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem("stack.theme", dark ? "light" : "dark");
  applyTheme(dark ? "light" : "dark");
}

function App({ problem }) {
  const route = useRoute();
  const [models, setModels] = useState([]);
  const [lacksModels, setLacksModels] = useState(false);
  const [access, setAccess] = useState(null);
  const [dialog, setDialog] = useState(null);
  const [error, setError] = useState(null);
  const [reloads, setReloads] = useState(0);
  const [broken, retry] = useErrorBoundary((bug) => console.error(bug));
  const refusedKey = useRef(null);
  const failedSignIn = useRef(problem);

  const openKeyDialog = useCallback(async (reason, isWanted) => setDialog({ kind: "key", reason, isWanted, signIn: await loadSignIn() }), []);
  const loadModels = useCallback(async () => {
    try {
      const key = await loadKey();
      setAccess(key);
      refusedKey.current = null;
      const listed = mayListModels(key) ? (await get("models")).data : [];
      setModels(listed);
      setLacksModels(mayListModels(key) && !listed.length);
      setError(null);
      return listed;
    } catch (failure) {
      setError(failure);
      return [];
    }
  }, []);
  useEffect(() => {
    const refused = () => {
      if (refusedKey.current === readKey()) return; // asked once for a key, not again for each of its requests
      refusedKey.current = readKey();
      openKeyDialog(failedSignIn.current || refusalOf(), true);
      failedSignIn.current = "";
    };
    addEventListener(UNAUTHORIZED, refused);
    addEventListener(MODELS_CHANGED, loadModels);
    if (problem) openKeyDialog(problem, true);
    loadModels();
    return () => (removeEventListener(UNAUTHORIZED, refused), removeEventListener(MODELS_CHANGED, loadModels));
  }, []);
  useEffect(() => listenToKeys(() => setDialog({ kind: "help" })), []);
  useEffect(() => {
    const close = (event) => event.key === "Escape" && setDialog(null);
    addEventListener("keydown", close);
    return () => removeEventListener("keydown", close);
  }, []);

  const views = VIEWS.filter(([name]) => mayShow(access || UNKNOWN, name));
  // a view that is not among those of the key is shown by its link still: its API says what the key lacks
  const [view, , title, View] = VIEWS.find(([name]) => name === (route.isDefault ? firstOf(views) : route.view)) || views[0];
  useEffect(() => {
    document.title = `${route.id ? `${route.id} · ` : ""}${title} · Responses Stack`;
  }, [title, route.id]);
  const isRefused = refusedKey.current === readKey();
  const Current = view === "responses" && route.id ? ResponseView : view === "playground" && route.id === "decisions" ? Decisions : View;
  return html`<${Rail} views=${views} current=${view} needsKey=${isRefused} onTheme=${nextTheme} onKey=${() => openKeyDialog(isRefused && refusalOf(), isRefused)} />
    <main class="view" id="main">
      ${error && view === "playground" && html`<${Failure} error=${error} onRetry=${loadModels} />`}
      ${broken
        ? html`<${Failure} error=${broken} onRetry=${retry} />`
        : html`<${Current} key=${view === "playground" ? `${reloads} ${view} ${route.id}` : `${reloads} ${view} ${KEEPS.has(view) ? "" : route.id}`} route=${route} models=${models} lacksModels=${lacksModels} access=${access || UNKNOWN} onModels=${loadModels} />`}
    </main>
    ${dialog?.kind === "key" &&
    html`<${KeyDialog}
      key=${dialog.reason}
      reason=${dialog.reason}
      isWanted=${dialog.isWanted}
      signIn=${dialog.signIn}
      access=${access || UNKNOWN}
      onClose=${() => setDialog(null)}
      onSaved=${() => {
        setDialog(null);
        setAccess(null);
        refusedKey.current = null;
        setReloads(reloads + 1);
        loadModels();
      }}
    />`}
    ${dialog?.kind === "help" && html`<${Help} onClose=${() => setDialog(null)} />`}`;
}

applyTheme(localStorage.getItem("stack.theme"));

const root = document.getElementById("app");
const answer = takeAnswer();
if (answer?.pending && !answer.fields.error) render(html`<p class="wait" role="status">Signing in…</p>`, root);
const problem = answer ? await completeSignIn(answer) : "";
render(html`<${App} problem=${problem} />`, root);
