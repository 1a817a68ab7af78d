// Forms for new keys, and the one look at a key's text.

import { apiPath, getAll, post } from "../../api.js";
import { isOfKey } from "../../limits.js";
import { ChoiceList } from "../../parts/choice_list.js";
import { Copy, Failure } from "../../parts/states.js";
import { html, useEffect, useRef, useState } from "../../vendor/preact.js";

const SCOPES = [
  ["responses", "chat, conversations, containers too"],
  ["files", "vector stores too"],
  ["read", "every GET"],
];
const TOOLS = ["web_search", "file_search", "code_interpreter", "image_generation", "mcp", "shell"].map((type) => [type]);
const LIVES = [
  ["", "never"],
  ["1", "in a day"],
  ["7", "in 7 days"],
  ["30", "in 30 days"],
  ["90", "in 90 days"],
  ["365", "in a year"],
];
const DAY_S = 86_400;
const secondsOf = (days) => (days ? Number(days) * DAY_S : undefined);

/** The text of a new key, until its reader has it. */
export function Secret({ secret, onClose }) {
  const field = useRef(null);
  useEffect(() => field.current.select(), [secret.value]);
  return html`<section class="secret" aria-label="The new key">
    <p><b>Copy the key “${secret.name}” now.</b> It is not shown again: the server stores only its hash.</p>
    <div class="row"><input ref=${field} class="mono grow" readonly aria-label="Key" value=${secret.value} onFocus=${(event) => event.target.select()} /><${Copy} text=${secret.value} label="Copy the key" />
      <button type="button" onClick=${onClose}>Done</button></div>
  </section>`;
}

/** The frame of a form: what is wrong, and the two buttons. `submit` returns a promise. */
function Form({ label, isWhole, submit, onClose, children }) {
  const [error, setError] = useState(null);
  const [waits, setWaits] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    setWaits(true);
    try {
      await submit();
    } catch (failure) {
      setError(failure);
      setWaits(false);
    }
  };
  return html`<form class="sheet" aria-label=${label} onSubmit=${send}>
    ${children}
    ${error && html`<${Failure} error=${error} />`}
    <div class="row"><button class="primary" disabled=${!isWhole || waits}>Create the key</button><button type="button" onClick=${onClose}>Cancel</button></div>
  </form>`;
}

function Name({ value, onChange }) {
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  return html`<label>Name<input ref=${field} maxlength="256" value=${value} onInput=${(event) => onChange(event.target.value)} /></label>`;
}

const Life = ({ value, onChange }) =>
  html`<label>Expires<select value=${value} onChange=${(event) => onChange(event.target.value)}>${LIVES.map(([days, text]) => html`<option key=${days} value=${days}>${text}</option>`)}</select></label>`;

export function NewKey({ project, onDone, onClose }) {
  const [name, setName] = useState("");
  const [days, setDays] = useState("90");
  const [owner, setOwner] = useState("");
  const [accounts, setAccounts] = useState([]);
  const [models, setModels] = useState([]);
  const [chosen, setChosen] = useState({ scopes: [], models: [], tools: [] });
  const created = useRef(null);
  const set = (field) => (values) => setChosen({ ...chosen, [field]: values });
  const path = apiPath`organization/projects/${project.id}`;
  useEffect(() => {
    getAll(`${path}/service_accounts`).then(setAccounts, () => {});
    getAll(`${path}/rate_limits`).then((limits) => setModels(limits.map(({ model }) => model).filter((model) => model !== "*" && !isOfKey(model))), () => {});
  }, [path]);
  const submit = async () => {
    const scopes = [...chosen.scopes, ...chosen.models.map((model) => `model:${model}`), ...chosen.tools.map((tool) => `tool:${tool}`)];
    // a second try, after an error of the key, does not create the account again
    const account = owner || created.current || (created.current = (await post(`${path}/service_accounts`, { name: name.trim(), create_service_account_only: true })).id);
    onDone(await post(`${path}/service_accounts/${account}/api_keys`, { name: name.trim(), scopes, expires_in_seconds: secondsOf(days) }));
  };
  return html`<${Form} label="New key" isWhole=${name.trim()} submit=${submit} onClose=${onClose}>
    <div class="fields"><${Name} value=${name} onChange=${setName} />
      <label>Account<select value=${owner} onChange=${(event) => setOwner(event.target.value)}>
        <option value="">create one for this key</option>
        ${accounts.map((account) => html`<option key=${account.id} value=${account.id}>${account.name}</option>`)}
      </select></label>
      <${Life} value=${days} onChange=${setDays} />
    </div>
    <div class="fields"><${ChoiceList} legend="Rights" known=${SCOPES} none="None chosen: all of them." chosen=${chosen.scopes} onChange=${set("scopes")} />
      <${ChoiceList} legend="Models" known=${models.map((model) => [model])} other="Other models" none="None chosen: any model." chosen=${chosen.models} onChange=${set("models")} />
      <${ChoiceList} legend="Tools of the server" known=${TOOLS} other="Other tools" none="None chosen: any tool. Functions are always allowed." chosen=${chosen.tools} onChange=${set("tools")} />
    </div>
  <//>`;
}

export function NewAdminKey({ onDone, onClose }) {
  const [name, setName] = useState("");
  const [days, setDays] = useState("90");
  const submit = async () => onDone(await post("organization/admin_api_keys", { name: name.trim(), expires_in_seconds: secondsOf(days) }));
  return html`<${Form} label="New administrator's key" isWhole=${name.trim()} submit=${submit} onClose=${onClose}>
    <div class="fields"><${Name} value=${name} onChange=${setName} /><${Life} value=${days} onChange=${setDays} /></div>
  <//>`;
}
