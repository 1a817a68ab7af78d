// The tree of a chain from the server's store: each node a response; children of one node are branches.
//
// A node with one child is followed below it at the same depth, so that a long chain does not run out of the page.

import { apiPath, get } from "../api.js";
import { treeOf } from "../chain.js";
import { plain } from "../format.js";
import { hashOf } from "../route.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { Failure, Id, Skeleton, Status, Time } from "./states.js";

export function Tree({ id }) {
  const [page, setPage] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    setPage(null);
    setError(null);
    const stops = new AbortController();
    get(apiPath`responses/${id}/tree`, { limit: 500 }, stops.signal).then(setPage, (failure) => failure.name !== "AbortError" && setError(failure));
    return () => stops.abort();
  }, [id]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!page) return html`<${Skeleton} rows=${3} />`;
  const tree = treeOf(page.data, id);
  const branches = [...tree.children.values()].reduce((count, rows) => count + rows.length - 1, 0);
  return html`<p class="quiet small">${page.data.length} ${page.data.length === 1 ? "response" : "responses"}, ${branches} ${branches === 1 ? "branch" : "branches"}${page.has_more ? ", more are not shown" : ""}</p>
    <ol class="tree">${tree.roots.map((row) => html`<${Branch} key=${row.id} row=${row} tree=${tree} current=${id} />`)}</ol>`;
}

/** A response and those that follow it, up to the next fork, whose branches are lists of their own. */
function Branch({ row, tree, current }) {
  const line = [row];
  for (let next = tree.children.get(row.id); next?.length === 1; next = tree.children.get(next[0].id)) line.push(next[0]);
  const forks = tree.children.get(line.at(-1).id) || [];
  return html`<li>
    ${line.map((each) => html`<${Node} key=${each.id} row=${each} on=${each.id === current} onPath=${tree.path.has(each.id)} />`)}
    ${forks.length > 0 && html`<ol>${forks.map((fork) => html`<${Branch} key=${fork.id} row=${fork} tree=${tree} current=${current} />`)}</ol>`}
  </li>`;
}

function Node({ row, on, onPath }) {
  return html`<div class="node ${on ? "on" : ""} ${onPath ? "path" : ""}" aria-current=${on ? "true" : undefined}>
    <div class="row">
      ${row.deleted
        ? html`<${Id} id=${row.id} /><span class="quiet small">deleted</span>`
        : html`<${Id} id=${row.id} href=${hashOf({ view: "responses", id: row.id, tab: "tree" })} /><${Status} status=${row.status} />
            <span class="quiet small clip">${row.model}</span><span class="grow"></span><span class="quiet small"><${Time} at=${row.created_at} /></span>`}
    </div>
    ${row.preview && html`<p class="clip quiet">${plain(row.preview)}</p>`}
  </div>`;
}
