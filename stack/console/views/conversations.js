// Conversations: the list, and the items of one.

import { apiPath, post, remove } from "../api.js";
import { CHAT_KEYS, chatOf, paramsOf } from "../chats.js";
import { shortId } from "../format.js";
import { Items } from "../parts/items.js";
import { DeleteButton, Empty, Failure, Id, Skeleton, Time } from "../parts/states.js";
import { Table, usePages } from "../parts/table.js";
import { hashOf, setParams } from "../route.js";
import { html, useState } from "../vendor/preact.js";
import { SearchBox } from "./responses.js";

export const Conversations = ({ route }) => (route.id ? html`<${Conversation} id=${route.id} />` : html`<${List} params=${route.params} />`);

function List({ params }) {
  const { search, order } = params;
  const pages = usePages("conversations", { search, order });
  const [error, setError] = useState(null);
  const create = () => post("conversations", {}).then(({ id }) => (location.hash = hashOf({ view: "conversations", id })), setError);
  const columns = [
    ["Title", (row) => row.metadata?.title && html`<a class="clip" href=${hashOf({ view: "playground", params: paramsOf(chatOf(row)) })}>${row.metadata.title}</a>`],
    ["Conversation", (row) => html`<${Id} id=${row.id} href=${hashOf({ view: "conversations", id: row.id })} />`],
    ["Metadata", (row) => html`<span class="clip mono small quiet">${ownMetadata(row)}</span>`],
    ["Created", (row) => html`<${Time} at=${row.created_at} />`],
    ["", (row) => html`<${DeleteButton} what=${shortId(row.id)} onDelete=${() => remove(apiPath`conversations/${row.id}`).then(() => pages.drop(row.id))} />`],
  ];
  return html`<div class="page">
    <header class="bar"><h1>Conversations</h1><span class="grow"></span>
      <${SearchBox} params=${params} label="Search ids and metadata" />
      <button onClick=${create}>New conversation</button><button onClick=${pages.reload}>Refresh</button>
    </header>
    ${error && html`<${Failure} error=${error} />`}
    <${Table}
      label="Conversations"
      pages=${pages}
      columns=${columns}
      empty=${search
        ? html`<${Empty} title="No conversation matches."><button onClick=${() => setParams({ search: "" })}>Show all</button><//>`
        : html`<${Empty} title="There is no conversation yet."><button onClick=${create}>New conversation</button><//>`}
    />
  </div>`;
}

/** The metadata that are not those by which the page keeps chats. */
function ownMetadata({ metadata }) {
  const pairs = Object.entries(metadata || {}).filter(([key]) => !metadata.title || !CHAT_KEYS.has(key));
  return pairs.length ? JSON.stringify(Object.fromEntries(pairs)) : "";
}

function Conversation({ id }) {
  const pages = usePages(apiPath`conversations/${id}/items`, { order: "asc" });
  const [error, setError] = useState(null);
  const deleted = async () => {
    try {
      await remove(apiPath`conversations/${id}`);
      location.hash = hashOf({ view: "conversations" });
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<div class="page narrow">
    <header class="bar"><h1><${Id} id=${id} /></h1><span class="grow"></span>
      <a class="button" href=${hashOf({ view: "playground", params: { chat: id } })}>Open as a chat</a>
      <a class="button" href=${hashOf({ view: "responses", params: { conversation: id } })}>Its responses</a><${DeleteButton} what=${id} onDelete=${deleted} /></header>
    ${(error || pages.error) && html`<${Failure} error=${error || pages.error} onRetry=${pages.reload} />`}
    ${!pages.rows && html`<${Skeleton} />`}
    ${pages.rows?.length === 0 && !pages.error && html`<${Empty} title="This conversation has no items yet." />`}
    ${pages.rows && html`<div class="turns"><${Items} items=${pages.rows} /></div>`}
    ${pages.more && html`<button class="more" onClick=${pages.more}>Load more</button>`}
  </div>`;
}
