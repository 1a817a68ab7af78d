// Conversations: the list, and the items of one.

import { post, remove } from "../api.js";
import { Items } from "../parts/items.js";
import { DeleteButton, Empty, Failure, Id, Skeleton, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf } from "../route.js";
import { html, useState } from "../vendor/preact.js";

export const Conversations = ({ route }) => (route.id ? html`<${Conversation} id=${route.id} />` : html`<${List} />`);

function List() {
  const pages = usePages("conversations");
  const create = async () => {
    const made = await post("conversations", {});
    location.hash = hashOf({ view: "conversations", id: made.id });
  };
  const columns = [
    ["Conversation", (row) => html`<${Id} id=${row.id} href=${hashOf({ view: "conversations", id: row.id })} />`],
    ["Metadata", (row) => html`<span class="clip mono small quiet">${Object.keys(row.metadata || {}).length ? JSON.stringify(row.metadata) : ""}</span>`],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
  ];
  return html`<div class="page">
    <header class="bar"><h1>Conversations</h1><span class="grow"></span><button onClick=${create}>New conversation</button><button onClick=${pages.reload}>Refresh</button></header>
    <${Table} label="Conversations" pages=${pages} columns=${columns} empty=${html`<${Empty} title="There is no conversation yet."><button onClick=${create}>New conversation</button><//>`} />
  </div>`;
}

function Conversation({ id }) {
  const pages = usePages(`conversations/${id}/items`, { order: "asc" });
  const [error, setError] = useState(null);
  const deleted = async () => {
    try {
      await remove(`conversations/${id}`);
      location.hash = hashOf({ view: "conversations" });
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<div class="page narrow">
    <header class="bar"><h1><${Id} id=${id} /></h1><span class="grow"></span><${DeleteButton} what=${id} onDelete=${deleted} /></header>
    ${(error || pages.error) && html`<${Failure} error=${error || pages.error} onRetry=${pages.reload} />`}
    ${!pages.rows && html`<${Skeleton} />`}
    ${pages.rows?.length === 0 && !pages.error && html`<${Empty} title="This conversation has no items yet." />`}
    ${pages.rows && html`<div class="turns"><${Items} items=${pages.rows} /></div>`}
    ${pages.more && html`<button class="more" onClick=${pages.more}>Load more</button>`}
  </div>`;
}
