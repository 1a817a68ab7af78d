// The bounds of a limit. A further bound of the server is a further row here; the table and the form follow.

/** Stands for no bound where OpenAI's objects require a number. */
export const NO_LIMIT = 1_000_000_000;

/** [field, what is counted, in which time]. Stored bytes and money are set by the API. */
export const BOUNDS = [
  ["max_requests_per_1_minute", "requests", "per minute"],
  ["max_tokens_per_1_minute", "tokens", "per minute"],
  ["max_requests_per_1_day", "requests", "per day"],
  ["max_tokens_per_1_day", "tokens", "per day"],
  ["max_tokens_per_1_month", "tokens", "per month"],
  ["max_tool_calls_per_1_day", "tool calls", "per day"],
  ["max_concurrent_responses", "responses", "at a time"],
];

export const boundOf = (limit, field) => (limit[field] === undefined || limit[field] === null || limit[field] >= NO_LIMIT ? null : limit[field]);
export const isBound = (limit) => BOUNDS.some(([field]) => boundOf(limit, field) !== null);
export const isOfKey = (subject) => subject.startsWith("key:");

/** The name of a limit's subject; `keys` are names by id. */
export function subjectName(subject, keys = {}) {
  if (subject === "*") return "Whole project";
  return isOfKey(subject) ? keys[subject.slice(4)] || subject.slice(4) : subject;
}
