// From events to what is shown: a pure function over typed events, the same for live, resumed and stored streams.
//
// The state is {response, items, meta, error}: `items` are output items as the API describes them, `meta[i]` holds what
// only the stream knows of item i: when it began and ended, and the last state word ("searching", "interpreting").

export const TERMINAL = new Set(["completed", "failed", "incomplete", "cancelled"]);

export const emptyState = () => ({ response: null, items: [], meta: [], error: null, lastNumber: -1 });

/** Return the state of a stored response, as if all of its events had been reduced. */
export const stateOf = (response) => ({
  ...emptyState(),
  response,
  items: response.output,
  meta: response.output.map(() => ({})),
});

/** Return the state after `event`, which came at `at` ms. */
export function reduce(state, event, at = 0) {
  const next = step(state, event, at);
  return event.sequence_number === undefined ? next : { ...next, lastNumber: event.sequence_number };
}

function step(state, event, at) {
  const { type } = event;
  if (type === "error") return { ...state, error: event.error || event };
  if (event.response) {
    const ended = TERMINAL.has(event.response.status);
    return {
      ...state,
      response: event.response,
      items: ended ? event.response.output : state.items,
      error: event.response.error || state.error,
    };
  }
  const index = event.output_index;
  if (index === undefined) return state;
  if (type === "response.output_item.added") return withItem(state, index, event.item, { startedAt: at, first: event.sequence_number });
  if (type === "response.output_item.done") return withItem(state, index, event.item, { endedAt: at, last: event.sequence_number, word: null });
  const item = state.items[index];
  if (!item) return state;
  const change = CHANGES[type];
  if (change) return withItem(state, index, change(item, event));
  const word = /^response\.(?:\w+_call|mcp_list_tools)\.(\w+)$/.exec(type)?.[1];
  if (word && !["done", "delta"].includes(word)) return withItem(state, index, item, { word });
  return state;
}

function withItem(state, index, item, meta) {
  const items = state.items.slice();
  items[index] = item;
  if (!meta) return { ...state, items };
  const metas = state.meta.slice();
  metas[index] = { ...metas[index], ...meta };
  return { ...state, items, meta: metas };
}

const at = (list, index, value) => {
  const copy = (list || []).slice();
  copy[index] = value;
  return copy;
};

const part = (field) => (item, event) => ({
  ...item,
  [field]: at(item[field], event.content_index ?? event.summary_index, event.part),
});

const append = (field, key, indexName) => (item, event) => {
  const index = event[indexName];
  const before = item[field]?.[index] || {};
  return { ...item, [field]: at(item[field], index, { ...before, [key]: (before[key] || "") + event.delta }) };
};

const appendTo = (key) => (item, event) => ({ ...item, [key]: (item[key] || "") + event.delta });
const replace = (key, from = key) => (item, event) => ({ ...item, [key]: event[from] });

const CHANGES = {
  "response.content_part.added": part("content"),
  "response.content_part.done": part("content"),
  "response.output_text.delta": append("content", "text", "content_index"),
  "response.refusal.delta": append("content", "refusal", "content_index"),
  "response.reasoning_text.delta": append("content", "text", "content_index"),
  "response.reasoning_summary_part.added": part("summary"),
  "response.reasoning_summary_part.done": part("summary"),
  "response.reasoning_summary_text.delta": append("summary", "text", "summary_index"),
  "response.output_text.annotation.added": (item, event) => {
    const before = item.content?.[event.content_index] || {};
    const annotations = at(before.annotations, event.annotation_index, event.annotation);
    return { ...item, content: at(item.content, event.content_index, { ...before, annotations }) };
  },
  "response.function_call_arguments.delta": appendTo("arguments"),
  "response.function_call_arguments.done": replace("arguments"),
  "response.mcp_call_arguments.delta": appendTo("arguments"),
  "response.mcp_call_arguments.done": replace("arguments"),
  "response.custom_tool_call_input.delta": appendTo("input"),
  "response.custom_tool_call_input.done": replace("input"),
  "response.code_interpreter_call_code.delta": appendTo("code"),
  "response.code_interpreter_call_code.done": replace("code"),
};

/** Return the calls that wait for the client: functions and custom tools without an output, approvals without an answer. */
export const openCalls = (items) =>
  items.filter((item) => ["function_call", "custom_tool_call", "mcp_approval_request", "local_shell_call", "apply_patch_call"].includes(item?.type));
