// From the events of a session to what is shown: a pure function, the same for live events and for those that were stored.
//
// The items are a window on the session: at most MOST_ITEMS of them, with `hasEarlier` and `isAtEnd` saying what is beyond.
// `lastRead` is the last item that was read where the events begin before it: until they reach it, they bring no new one.
// `subagents` has each subagent by its id, with its items as they came, and `ofTurn` the subagent of each turn of one.

/** Items that are shown, and kept, at once. */
export const MOST_ITEMS = 240;
const DROPPED_AT_ONCE = 40;
/** Characters of a command's output that are kept while it runs; its end is the part that counts. */
const MOST_OUTPUT_CHARS = 100_000;

export const emptySession = () => ({ session: null, turns: new Map(), items: [], hasEarlier: false, isAtEnd: true, lastNumber: undefined, lastRead: null, environment: null, error: null, subagents: new Map(), ofTurn: new Map() });

export const isFinal = (item) => Boolean(item.status) && item.status !== "in_progress";
export const hasEnded = (turn) => ["completed", "failed", "cancelled"].includes(turn.status);

/** The state with turns that were read; one that has ended does not run again. */
export function withTurns(state, turns) {
  const all = new Map(state.turns);
  for (const turn of turns) {
    if (turn.subagent_id) state = withSubagentTurn(state, turn);
    else if (!all.has(turn.id) || !hasEnded(all.get(turn.id))) all.set(turn.id, turn);
  }
  return { ...state, turns: all };
}

const NEW_SUBAGENT = { subagent: null, turn: null, items: [], isRead: false, hasEarlier: false };

/** The state with a subagent changed by `change`, which gets what is known of it. */
export function withSubagent(state, id, change) {
  const known = state.subagents.get(id) || NEW_SUBAGENT;
  return { ...state, subagents: new Map(state.subagents).set(id, { ...known, ...change(known) }) };
}

function withSubagentTurn(state, turn) {
  const isOld = (known) => known.turn && (known.turn.id === turn.id ? hasEnded(known.turn) : known.turn.created_at > turn.created_at);
  const ofTurn = new Map(state.ofTurn).set(turn.id, turn.subagent_id);
  return withSubagent({ ...state, ofTurn }, turn.subagent_id, (known) => (isOld(known) ? {} : { turn }));
}

/** The state with items of a subagent that were read, oldest first; what came live and is newer stays. */
export function withSubagentItems(state, id, read, hasEarlier) {
  return withSubagent(state, id, ({ items }) => {
    const live = new Map(items.map((item) => [item.id, item]));
    const known = read.map((item) => (live.has(item.id) && !isFinal(item) ? live.get(item.id) : item));
    const ids = new Set(read.map((item) => item.id));
    return { items: [...known, ...items.filter((item) => !ids.has(item.id))], isRead: true, hasEarlier };
  });
}

/** Return the state after `event`; one that it knows already changes nothing. */
export function reduce(state, event) {
  const number = event.sequence_number;
  if (number !== undefined && number <= state.lastNumber) return state;
  const next = step(state, event);
  return number === undefined ? next : { ...next, lastNumber: number };
}

function step(state, event) {
  const { type } = event;
  if (type === "error") return { ...state, error: event.error };
  if (event.session) return { ...state, session: event.session, error: null };
  if (event.turn) return withTurns(state, [event.turn]);
  if (event.subagent) return withSubagent(state, event.subagent.id, () => ({ subagent: event.subagent }));
  const owner = state.ofTurn.get(event.turn_id);
  if (owner) return withSubagent(state, owner, ({ items, hasEarlier }) => pick(stepItems({ ...emptySession(), items, hasEarlier }, event)));
  if (event.environment) return { ...state, environment: { ...state.environment, ...event.environment } };
  if (event.reset_count !== undefined) return { ...state, environment: { ...state.environment, id: event.environment_id, resets: event.reset_count } };
  return stepItems(state, event);
}

const pick = ({ items, hasEarlier }) => ({ items, hasEarlier });

function stepItems(state, event) {
  const { type } = event;
  const name = type.replace(/^agent\.(session\.turn|output)\./, "");
  if (name === "item.added") return withItem(state, event);
  if (name === "item.done") return changeItem(state, event.item.id, () => ({ ...event.item, turn_id: event.item.turn_id || event.turn_id }));
  const change = CHANGES[name];
  return change ? changeItem(state, event.item_id, (item) => (isFinal(item) ? item : change(item, event))) : state;
}

function withItem(state, event) {
  const item = { ...event.item, turn_id: event.item.turn_id || event.turn_id };
  const { lastRead } = state;
  if (lastRead === item.id) state = { ...state, lastRead: null };
  if (state.items.some(({ id }) => id === item.id)) return changeItem(state, item.id, (known) => (isFinal(known) ? known : item));
  if (lastRead || !state.isAtEnd) return state;
  const items = [...state.items, item];
  if (items.length <= MOST_ITEMS) return { ...state, items };
  return { ...state, items: items.slice(DROPPED_AT_ONCE), hasEarlier: true };
}

/** Change the item of that id, if it is shown. */
function changeItem(state, id, change) {
  const index = state.items.findLastIndex((item) => item.id === id);
  if (index < 0) return state;
  const changed = change(state.items[index]);
  if (changed === state.items[index]) return state;
  const items = state.items.slice();
  items[index] = changed;
  return { ...state, items };
}

const put = (list, index, value) => {
  const copy = (list || []).slice();
  copy[index] = value;
  return copy;
};
const setPart = (field, index) => (item, event) => ({ ...item, [field]: put(item[field], event[index], event.part) });
const text = (field, index, join) => (item, event) => {
  const before = item[field]?.[event[index]] || { type: field === "summary" ? "summary_text" : "output_text", text: "" };
  return { ...item, [field]: put(item[field], event[index], { ...before, text: join(before.text, event) }) };
};
const grown = (before, event) => before + event.delta;
const whole = (_, event) => event.text;

const CHANGES = {
  "content_part.added": setPart("content", "content_index"),
  "content_part.done": setPart("content", "content_index"),
  "output_text.delta": text("content", "content_index", grown),
  "output_text.done": text("content", "content_index", whole),
  "reasoning_summary_part.added": setPart("summary", "summary_index"),
  "reasoning_summary_part.done": setPart("summary", "summary_index"),
  "reasoning_summary_text.delta": text("summary", "summary_index", grown),
  "reasoning_summary_text.done": text("summary", "summary_index", whole),
  "command_execution_output.delta": (item, { delta }) => {
    const output = (item.output || "") + delta;
    return output.length > MOST_OUTPUT_CHARS * 1.2 ? { ...item, output: output.slice(-MOST_OUTPUT_CHARS), isCut: true } : { ...item, output };
  },
};
