// A thread: the turns in sight, the branches around them, and what follows when one sends, tries again or edits.

import { Branches, loadBranches, readTurns, turnsOfConversation } from "./chain.js";
import { titleOf } from "./chats.js";
import { openCalls } from "./reducer.js";
import { Run } from "./run.js";
import { bodyOf } from "./settings.js";

/** Turns that are read at once: those before them come when they are asked for. */
const TURNS_AT_ONCE = 30;

export class Thread {
  /** `onChange()` draws; `onShown(id)` says which response is the last in sight, "" for none. `record` is that of the chat. */
  constructor({ onChange, onShown, record }) {
    Object.assign(this, { onChange, onShown, record });
    this.reset();
  }

  reset() {
    this.turns?.forEach((turn) => turn.run.close());
    this.turns = [];
    this.earlier = [];
    this.branches = new Branches();
    this.shown = "";
    this.failure = null;
    this.loads = (this.loads || 0) + 1;
    this.isLoading = false;
  }

  get last() {
    return this.turns.at(-1);
  }

  get isRunning() {
    return Boolean(this.last?.run.running);
  }

  /** Show the chain up to a stored response; with `toEnd`, up to the end of the newest branch after it. */
  async load(id, { toEnd = false } = {}) {
    this.reset();
    this.shown = id;
    this.isLoading = true;
    this.onChange();
    const load = this.loads;
    try {
      if (id.startsWith("conv_")) return await this.loadConversation(id, load);
      const branches = await loadBranches(id);
      const end = toEnd ? branches.leafOf(id) : id;
      const path = branches.pathTo(end);
      const turns = await readTurns(path.slice(-TURNS_AT_ONCE), branches, this.onChange);
      if (load !== this.loads) return turns.forEach((turn) => turn.run.close());
      Object.assign(this, { branches, turns, earlier: path.slice(0, -TURNS_AT_ONCE) });
      this.show(end);
      await this.record.load(turns.at(-1)?.run.state.response.metadata?.chat);
    } catch (error) {
      if (load === this.loads) this.failure = error;
    }
    if (load === this.loads) this.isLoading = false;
    return this.onChange();
  }

  /** Show the items of a conversation as turns that no response has: what follows sends them along. */
  async loadConversation(id, load) {
    const turns = await turnsOfConversation(id, this.onChange);
    await this.record.load(id);
    if (load === this.loads) Object.assign(this, { turns, isLoading: false });
    return this.onChange();
  }

  async loadEarlier() {
    const load = this.loads;
    const ids = this.earlier.slice(-TURNS_AT_ONCE);
    const turns = await readTurns(ids, this.branches, this.onChange);
    if (load !== this.loads) return;
    this.earlier = this.earlier.slice(0, -TURNS_AT_ONCE);
    this.turns = [...turns, ...this.turns];
    this.onChange();
  }

  show(id) {
    this.shown = id;
    this.onShown(id);
  }

  /** The branches at a turn: {ids, at}; those at the first turn may be trees of their own. */
  branchesAt(turn) {
    const id = turn.run.state.response?.id;
    if (!id) return { ids: [], at: 0 };
    const isFirst = turn === this.turns[0] && !this.earlier.length;
    const ids = this.branches.has(id) ? this.branches.siblings(id) : [id];
    const roots = isFirst ? (this.record.chat?.roots || []).filter((root) => !ids.includes(root)) : [];
    const all = [...ids, ...roots].filter(Boolean).sort();
    return { ids: all, at: all.indexOf(id) };
  }

  /** Show the branch that goes on from the response `id` in place of the turn at `index`. */
  async switchTo(index, id) {
    if (!this.branches.has(id)) return this.load(id, { toEnd: true });
    const load = (this.loads += 1);
    const end = this.branches.leafOf(id);
    const path = this.branches.pathTo(end);
    const after = path.slice(path.indexOf(id));
    try {
      const turns = await readTurns(after, this.branches, this.onChange);
      if (load !== this.loads) return undefined;
      this.turns.slice(index).forEach((turn) => turn.run.close());
      this.turns = [...this.turns.slice(0, index), ...turns];
      this.show(end);
      this.record.note(end, false);
    } catch (error) {
      this.failure = error;
    }
    return this.onChange();
  }

  /** The number of stored turns on the newest branch after the last one in sight. */
  get laterTurns() {
    const id = this.last?.run.state.response?.id;
    if (!id || !this.branches.has(id)) return 0;
    return this.branches.pathTo(this.branches.leafOf(id)).length - this.branches.pathTo(id).length;
  }

  showLater() {
    const { id } = this.last.run.state.response;
    return this.switchTo(this.turns.length - 1, id);
  }

  /** Send `input` after the turns before `at`; later ones stay stored, as a branch. Throws an Error for wrong settings. */
  send(settings, input, at = this.turns.length) {
    this.failure = null;
    const before = this.turns.slice(0, at);
    const previous = before.findLast((turn) => turn.run.state.response?.store)?.run.state.response;
    const body = bodyOf(settings, input, previous);
    if (!previous && before.length) body.input = [...before.flatMap((turn) => [...turn.input, ...turn.run.state.items]), ...input];
    let isNoted = !body.store;
    const run = new Run(body, ({ state }) => {
      if (!isNoted && state.response) {
        isNoted = true;
        this.note(state.response);
      }
      this.onChange();
    });
    this.turns.slice(at).forEach((turn) => turn.run.close());
    this.turns = [...before, { input, run, answers: {} }];
    this.start(run, body, previous);
    this.onChange();
  }

  async start(run, body, previous) {
    if (body.store) {
      const [first] = this.turns;
      const root = previous && (this.branches.pathTo(previous.id)[0] || previous.id);
      const chat = await this.record.ensure({ title: titleOf(questionOf(first.input)), root });
      if (chat) body.metadata = { chat };
    }
    if (!run.isClosed) await run.start();
  }

  note({ id, previous_response_id, created_at }) {
    this.branches.add({ id, previous_response_id, created_at });
    this.show(id);
    this.record.note(id, !previous_response_id);
  }

  /** Collect answers until all open calls of the last turn have one, then send them together. */
  answer(settings, item, given) {
    const turn = this.last;
    turn.answers[item.id] = answerItem(item, given);
    const calls = openCalls(turn.run.state.items);
    if (calls.every((call) => turn.answers[call.id])) this.send(settings, calls.map((call) => turn.answers[call.id]));
    else this.onChange();
  }

  isOpen(item) {
    return Boolean(this.last && !this.isRunning && openCalls(this.last.run.state.items).includes(item) && !this.last.answers?.[item.id]);
  }

  close() {
    this.loads += 1;
    this.turns.forEach((turn) => turn.run.close());
  }
}

export const userMessage = (text, parts) => ({ role: "user", content: [...(text ? [{ type: "input_text", text }] : []), ...parts] });

const partsOf = (input) => input.flatMap((item) => (typeof item.content === "string" ? [{ type: "input_text", text: item.content }] : item.content || []));

/** The text of a question, for its title and to be edited. */
export const questionOf = (input) => partsOf(input).map((part) => part.text || "").filter(Boolean).join("\n");

/** The pictures and files of a question. */
export const attachmentsOf = (input) => partsOf(input).filter((part) => part.type === "input_image" || part.type === "input_file");

function answerItem(item, given) {
  if (item.type === "mcp_approval_request") return { type: "mcp_approval_response", approval_request_id: item.id, approve: given.approve, ...(given.reason && { reason: given.reason }) };
  return { type: item.type.replace(/_call$/, "_call_output"), call_id: item.call_id, output: given };
}

