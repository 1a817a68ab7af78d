// The tree of a chain of stored responses: its branches, the path to one response, and the turns of a path.

import { apiPath, get, getAll } from "./api.js";
import { itemsRun, storedRun } from "./run.js";

const READS_AT_ONCE = 6;
const MOST_ROWS = 1000;

/** Rows of a tree by id, with what follows each of them. A row whose parent is unknown is a root. */
export class Branches {
  constructor(rows = []) {
    this.byId = new Map();
    this.children = new Map();
    this.roots = [];
    rows.forEach((row) => this.byId.set(row.id, row));
    rows.forEach((row) => this.hang(row));
  }

  hang(row) {
    const parent = this.byId.has(row.previous_response_id) ? row.previous_response_id : null;
    if (parent === null) this.roots.push(row);
    else this.children.set(parent, [...(this.children.get(parent) || []), row]);
  }

  /** Add a response that was made just now; one that is known already changes nothing. */
  add(row) {
    if (this.byId.has(row.id)) return;
    this.byId.set(row.id, row);
    this.hang(row);
  }

  has(id) {
    return this.byId.has(id);
  }

  /** Ids from the root to `id`. */
  pathTo(id) {
    const path = new Set();
    for (let row = this.byId.get(id); row && !path.has(row.id); row = this.byId.get(row.previous_response_id)) path.add(row.id);
    return [...path].reverse();
  }

  /** Ids of the responses that follow what `id` follows, itself included, in the order in which they were made. */
  siblings(id) {
    const row = this.byId.get(id);
    const among = row && this.byId.has(row.previous_response_id) ? this.children.get(row.previous_response_id) : this.roots;
    return (among || []).filter((each) => !each.deleted || this.children.has(each.id)).map((each) => each.id).sort();
  }

  /** The end of the newest branch after `id`: ids begin with the time. */
  leafOf(id) {
    let leaf = id;
    for (const seen = new Set(); this.children.has(leaf) && !seen.has(leaf); ) {
      seen.add(leaf);
      leaf = this.children.get(leaf).reduce((newest, { id: other }) => (other > newest ? other : newest), "");
    }
    return leaf;
  }
}

/** Return {roots, children: by id, path: ids from the root to `current`} of the rows of a tree. */
export function treeOf(rows, current) {
  const branches = new Branches(rows);
  return { roots: branches.roots, children: branches.children, path: new Set(branches.pathTo(current)) };
}

/** Load the branches of the tree that a stored response is in. Throws ApiError. */
export async function loadBranches(id) {
  const { data } = await get(apiPath`responses/${id}/tree`, { limit: MOST_ROWS });
  return new Branches(data);
}

/** Call `work` for all values, a few at a time; return the results in their order. */
export async function inTurns(values, work) {
  const results = [];
  for (let start = 0; start < values.length; start += READS_AT_ONCE) results.push(...(await Promise.all(values.slice(start, start + READS_AT_ONCE).map(work))));
  return results;
}

/** Return the turns {id, input, run, answers, followsDeleted} of the stored responses `ids`, a part of a path. Of a deleted
 * response nothing is left: the turn that follows it says so. */
export function readTurns(ids, branches, onChange) {
  const isDeleted = (id) => Boolean(branches.byId.get(id)?.deleted);
  return inTurns(
    ids.filter((id) => !isDeleted(id)),
    async (id) => {
      const [run, input] = await Promise.all([storedRun(id, onChange), getAll(apiPath`responses/${id}/input_items`, { order: "asc" })]);
      return { id, input, run, answers: {}, followsDeleted: isDeleted(branches.byId.get(id)?.previous_response_id) };
    },
  );
}

/** Return the turns of a conversation without responses: each begins with what is not from the model. */
export async function turnsOfConversation(id, onChange) {
  const items = (await getAll(apiPath`conversations/${id}/items`, { order: "asc" })).filter(({ type }) => type === "message");
  const groups = [];
  for (const { role, content } of items) {
    const item = { type: "message", role, content };
    const isAnswer = role === "assistant";
    if (!groups.length || (!isAnswer && groups.at(-1).output.length)) groups.push({ input: [], output: [] });
    groups.at(-1)[isAnswer ? "output" : "input"].push(item);
  }
  return groups.map(({ input, output }) => ({ input, run: itemsRun(output, onChange), answers: {} }));
}
