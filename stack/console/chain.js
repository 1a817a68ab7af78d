// The tree of a chain of stored responses, and the turns on the path to one of them.

import { apiPath, get, getAll } from "./api.js";
import { storedRun } from "./run.js";

const READS_AT_ONCE = 6;

/** Return {roots, children: by id, path: ids from the root to `current`} of the rows of a tree. */
export function treeOf(rows, current) {
  const byId = new Map(rows.map((row) => [row.id, row]));
  const children = new Map();
  const roots = [];
  for (const row of rows) {
    const parent = byId.has(row.previous_response_id) ? row.previous_response_id : null;
    if (parent === null) roots.push(row);
    else children.set(parent, [...(children.get(parent) || []), row]);
  }
  const path = new Set();
  for (let row = byId.get(current); row && !path.has(row.id); row = byId.get(row.previous_response_id)) path.add(row.id);
  return { roots, children, path };
}

/** Return the turns {input, run, followsDeleted} of a stored response and of those that it continues, in their order. Of a
 * deleted response nothing is left: the turn that follows it says so. */
export async function storedTurns(id, onChange) {
  const { data } = await get(apiPath`responses/${id}/tree`, { limit: 1000 });
  const deleted = new Set(data.filter((row) => row.deleted).map((row) => row.id));
  const ids = [...treeOf(data, id).path].reverse();
  const read = async (each) => {
    const [run, input] = await Promise.all([storedRun(each, onChange), getAll(apiPath`responses/${each}/input_items`, { order: "asc" })]);
    return { input, run, answers: {}, followsDeleted: deleted.has(ids[ids.indexOf(each) - 1]) };
  };
  const shown = ids.filter((each) => !deleted.has(each));
  const turns = [];
  for (let start = 0; start < shown.length; start += READS_AT_ONCE) turns.push(...(await Promise.all(shown.slice(start, start + READS_AT_ONCE).map(read))));
  return turns;
}
