// The workspace of a session: a container with a shell and files, chosen when the session begins, looked into later.

import { apiPath } from "../api.js";
import { bytes } from "../format.js";
import { Icon } from "../parts/icons.js";
import { Failure, Status } from "../parts/states.js";
import { Switch } from "../parts/tool_switches.js";
import { reasonOf } from "../tools.js";
import { html, useCallback, useEffect, useRef, useState } from "../vendor/preact.js";
import { read, write } from "./api.js";

const FOLDER = "/workspace";
const MOST_BYTES = 16 * 1024 ** 2;
const MOST_FILES = 50;
const LISTED = 100;

export const NO_WORKSPACE = { isOn: false, isOpen: false, files: [] };

/** A file as the API takes it, in base64. */
function encode(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ type: "inline", path: `${FOLDER}/${file.name}`, data: reader.result.slice(reader.result.indexOf(",") + 1) });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** The environment of a request for this choice. */
export async function environmentOf({ isOn, isOpen, files }) {
  if (!isOn) return { type: "none" };
  return { type: "openai_hosted", ...(isOpen && { network: { access: "enabled" } }), ...(files.length && { files: await Promise.all(files.map(encode)) }) };
}

export function WorkspaceChoice({ value, server, onChange }) {
  const { isOn, isOpen, files } = value;
  const reason = reasonOf(server, "shell");
  const tooLarge = files.find((file) => file.size > MOST_BYTES);
  return html`<div class="workspace-choice">
    <${Switch} label="With a workspace" note="a shell and files in a container of this server" reason=${reason} isOn=${isOn} onChange=${(event) => onChange({ ...value, isOn: event.target.checked })} />
    ${isOn &&
    html`<div class="inside">
      <label class="check"><input type="checkbox" checked=${isOpen} onChange=${(event) => onChange({ ...value, isOpen: event.target.checked })} /> programs reach the hosts that the operator opens</label>
      <label>Files to begin with<input type="file" multiple onChange=${(event) => onChange({ ...value, files: [...event.target.files].slice(0, MOST_FILES) })} /></label>
      ${tooLarge && html`<p class="bad small" role="alert">${tooLarge.name} is larger than ${bytes(MOST_BYTES)}.</p>`}
    </div>`}
  </div>`;
}

const LIVE = new Set(["ready", "connected"]);

/** The state of an environment as the events tell it, or as it was read. */
export function Workspace({ environment }) {
  const [isOpened, setOpened] = useState(false);
  const [found, setFound] = useState(null);
  const { id, status, error } = { ...found, ...environment };
  useEffect(() => {
    if (!environment.status) read(apiPath`agents/environments/${id}`).then(setFound, () => {});
  }, [id]);
  return html`<details class="workspace" onToggle=${(event) => setOpened(event.target.open)}>
    <summary>Workspace${status ? html` <${Status} status=${status} />` : ""}</summary>
    ${error && html`<p class="bad">${typeof error === "string" ? error : error.message}</p>`}
    ${environment.resets > 0 && html`<p class="amber">Its container was lost. Its files are those that were saved last.</p>`}
    ${isOpened && id && html`<${Files} id=${id} status=${status} />`}
  </details>`;
}

function Files({ id, status }) {
  const [page, setPage] = useState(null);
  const [error, setError] = useState(null);
  const chooser = useRef(null);
  const path = apiPath`agents/environments/${id}`;
  const load = useCallback(
    () =>
      read(`${path}/files`, { limit: LISTED, order: "asc" }).then(
        (found) => (setPage(found), setError(null)),
        (failure) => (setPage({ data: [] }), setError(failure)),
      ),
    [path],
  );
  useEffect(() => void load(), [path, status]);
  const put = async (event) => {
    const files = [...event.target.files];
    try {
      for (const file of files) await write(`${path}/files`, await encode(file));
      await load();
    } catch (failure) {
      setError(failure);
    }
  };
  const isLive = !status || LIVE.has(status);
  return html`${error && html`<${Failure} error=${error} onRetry=${load} />`}
    ${!page && html`<p class="quiet">Its files are read. While a command runs, this takes until its end.</p>`}
    ${page?.data.length === 0 && !error && html`<p class="quiet">It has no files.</p>`}
    <ul class="rows">${(page?.data || []).map((file) => html`<li key=${file.path} class="row"><${Icon} name="files" /><span class="clip mono">${file.path}</span><span class="grow"></span><span class="quiet small tabular">${bytes(file.size_bytes)}</span></li>`)}</ul>
    ${page?.next && html`<p class="quiet small">The first ${LISTED} are shown.</p>`}
    <div class="row"><input ref=${chooser} type="file" multiple hidden aria-hidden="true" tabindex="-1" onChange=${put} /><button type="button" disabled=${!isLive} onClick=${() => chooser.current.click()}>Put files in</button><button type="button" onClick=${load}>Refresh</button></div>`;
}
