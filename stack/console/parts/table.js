// A listing: rows from a cursor, more on demand, refreshed in place.

import { get } from "../api.js";
import { html, useCallback, useEffect, useState } from "../vendor/preact.js";
import { Empty, Failure, Skeleton } from "./states.js";

/** Load pages of `path` by `read`; return {rows, error, more, reload}. `more` is null at the end. */
export function usePages(path, query = {}, read = get) {
  const [state, setState] = useState({ rows: null, error: null, after: null });
  const key = JSON.stringify([path, query]);
  const load = useCallback(
    async (after, before) => {
      try {
        const page = await read(path, { limit: 50, ...query, after });
        const last = page.last_id || page.data.at(-1)?.id;
        setState({ rows: [...before, ...page.data], error: null, after: page.has_more ? last : null });
      } catch (error) {
        setState((old) => ({ ...old, rows: old.rows || [], error }));
      }
    },
    [key],
  );
  useEffect(() => {
    setState({ rows: null, error: null, after: null });
    load(undefined, []);
  }, [key]);
  return {
    ...state,
    more: state.after ? () => load(state.after, state.rows) : null,
    reload: () => load(undefined, []),
    drop: (id) => setState((old) => ({ ...old, rows: old.rows.filter((row) => row.id !== id) })),
  };
}

/** With `labelled`, narrow windows show the names of columns in each row. */
export function Table({ pages, columns, empty, label, labelled }) {
  const { rows, error, more, reload } = pages;
  if (error?.code === "not_configured") return html`<${Empty} title=${error.message} />`;
  if (error) return html`<${Failure} error=${error} onRetry=${reload} />`;
  if (!rows) return html`<${Skeleton} />`;
  if (!rows.length) return empty || html`<${Empty} title="There is nothing here yet." />`;
  return html`<div class="scroll"><table class="list ${labelled ? "labelled" : ""}" aria-label=${label}>
      <thead><tr>${columns.map(([name]) => html`<th key=${name} scope="col">${name || html`<span class="hidden">Actions</span>`}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.id}>${columns.map(([name, cell]) => html`<td key=${name} data-label=${name}>${cell(row)}</td>`)}</tr>`)}</tbody>
    </table></div>
    ${more && html`<button class="more" onClick=${more}>Load more</button>`}`;
}
