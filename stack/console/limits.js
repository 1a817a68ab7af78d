// The bounds of a limit. A further bound of the server is a further row here; the table and the form follow.

/** Stands for no bound where OpenAI's objects require a number. */
export const NO_LIMIT = 1_000_000_000;

/** [field, what is counted, in which time]. */
export const BOUNDS = [
  ["max_requests_per_1_minute", "requests", "minute"],
  ["max_tokens_per_1_minute", "tokens", "minute"],
  ["max_requests_per_1_day", "requests", "day"],
  ["max_tokens_per_1_day", "tokens", "day"],
  ["max_tokens_per_1_month", "tokens", "month"],
];

export const boundOf = (limit, field) => (limit[field] === undefined || limit[field] === null || limit[field] >= NO_LIMIT ? null : limit[field]);
export const isBound = (limit) => BOUNDS.some(([field]) => boundOf(limit, field) !== null);
export const isOfKey = (subject) => subject.startsWith("key:");

/** The name of a limit's subject; `keys` are names by id. */
export function subjectName(subject, keys = {}) {
  if (subject === "*") return "Whole project";
  return isOfKey(subject) ? keys[subject.slice(4)] || subject.slice(4) : subject;
}
