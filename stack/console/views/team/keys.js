// The keys of a project, and those of administrators: list, create, revoke. A new key's text is shown once.

import { apiPath, remove } from "../../api.js";
import { ConfirmButton, Empty, Time } from "../../parts/states.js";
import { Table, usePages } from "../../parts/table.js";
import { html, useState } from "../../vendor/preact.js";
import { NewAdminKey, NewKey, Secret } from "./new_key.js";

const DAY_S = 86_400;

const columnsOf = (revoke, rights) => [
  ["Name", (row) => html`<b class="clip" title=${row.name}>${row.name}</b>`],
  ["Key", (row) => html`<span class="mono" title=${row.id}>${row.redacted_value}</span>`],
  ...rights,
  ["Last used", (row) => (row.last_used_at ? html`<${Time} at=${row.last_used_at} />` : html`<span class="quiet">never</span>`)],
  ["Expires", (row) => html`<${Expiry} at=${row.expires_at} />`],
  ["Created", (row) => html`<${Time} at=${row.created_at} />`],
  ["", (row) => html`<${ConfirmButton} verb="Revoke" what=${row.name} onConfirm=${() => revoke(row)} />`],
];

function Expiry({ at }) {
  if (!at) return html`<span class="quiet">never</span>`;
  const left = at - Date.now() / 1000;
  if (left <= 0) return html`<span class="bad">expired</span>`;
  return html`<span class=${left < 7 * DAY_S ? "amber" : ""}><${Time} at=${at} /></span>`;
}

/** Rights as the API has them: `responses`, `model:NAME`, `tool:TYPE`; none means all of them. */
const Rights = ({ scopes }) =>
  scopes.length ? html`<span class="row wrap rights">${scopes.map((scope) => html`<code key=${scope}>${scope}</code>`)}</span>` : html`<span class="quiet">everything in the project</span>`;

/** A list of keys with the form for a new one: `Form` gets onDone(key with its value) and onClose(). */
function Keys({ pages, columns, label, empty, Form, project }) {
  const [opens, setOpens] = useState(false);
  const [secret, setSecret] = useState(null);
  const done = (key) => {
    setSecret(key);
    setOpens(false);
    pages.reload();
  };
  return html`<div class="row tools">
      <button class="primary" aria-expanded=${opens} onClick=${() => setOpens(!opens)}>New key</button><span class="grow"></span><button onClick=${pages.reload}>Refresh</button>
    </div>
    ${secret && html`<${Secret} secret=${secret} onClose=${() => setSecret(null)} />`}
    ${opens && html`<${Form} project=${project} onDone=${done} onClose=${() => setOpens(false)} />`}
    <${Table} label=${label} labelled pages=${pages} columns=${columns} empty=${!opens && html`<${Empty} title=${empty}><button onClick=${() => setOpens(true)}>New key</button><//>`} />`;
}

export function ProjectKeys({ project }) {
  const path = apiPath`organization/projects/${project.id}/api_keys`;
  const pages = usePages(path);
  const rights = [
    ["Rights", (row) => html`<${Rights} scopes=${row.scopes || []} />`],
    ["Account", (row) => html`<span class="clip">${row.owner?.service_account?.name || ""}</span>`],
  ];
  const columns = columnsOf((row) => remove(`${path}/${row.id}`).then(() => pages.drop(row.id)), rights);
  return html`<${Keys} pages=${pages} columns=${columns} label="Keys" empty="${project.name} has no key." Form=${NewKey} project=${project} />`;
}

export function AdminKeys() {
  const pages = usePages("organization/admin_api_keys");
  const columns = columnsOf((row) => remove(apiPath`organization/admin_api_keys/${row.id}`).then(() => pages.drop(row.id)), []);
  return html`<p class="quiet">Keys of administrators manage projects, keys and limits and read usage. They use no model and read nothing of a project.</p>
    <${Keys} pages=${pages} columns=${columns} label="Administrators' keys" empty="No stored key is an administrator's." Form=${NewAdminKey} />`;
}
