// The bounds of a limit. A further bound of the server is a further row here; the table and the form follow.

import { count } from "./format.js";

/** {none: the number that stands for no bound, textOf, parse: undefined for a text that is none, rule}. */
const COUNTS = {
  none: 1_000_000_000,
  textOf: count,
  parse: (text) => (/^\d{1,9}$/.test(digitsOf(text)) ? Number(digitsOf(text)) : undefined),
  rule: "a whole number below a billion",
};
const SIZES = {
  none: 2 ** 53,
  textOf: sizeOf,
  parse: parseSize,
  rule: "a size such as 512 MiB or 20 GiB",
};
/** Money, in cents. */
export const CENTS = {
  none: null,
  textOf: (cents) => (cents / 100).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }),
  parse: (text) => (/^(\d{1,3}(,\d{3})+|\d{1,10})(\.\d{1,2})?$/.test(text) ? Math.round(Number(text.replace(/,/g, "")) * 100) : undefined),
  rule: "an amount such as 250 or 1,250.50",
};

/** [field, what is counted, in which time, its unit]. Those of PROJECT_BOUNDS are of a whole project only. */
export const ROW_BOUNDS = [
  ["max_requests_per_1_minute", "requests", "per minute", COUNTS],
  ["max_tokens_per_1_minute", "tokens", "per minute", COUNTS],
  ["max_requests_per_1_day", "requests", "per day", COUNTS],
  ["max_tokens_per_1_day", "tokens", "per day", COUNTS],
  ["max_tokens_per_1_month", "tokens", "per month", COUNTS],
  ["max_tool_calls_per_1_day", "tool calls", "per day", COUNTS],
  ["max_concurrent_responses", "responses", "at a time", COUNTS],
  ["max_background_responses", "background responses", "at a time", COUNTS],
];
export const PROJECT_BOUNDS = [["max_stored_bytes", "stored data", "in all", SIZES]];
export const BOUNDS = [...ROW_BOUNDS, ...PROJECT_BOUNDS];

export const boundOf = (limit, [field, , , unit]) => (limit[field] === undefined || limit[field] === null || limit[field] >= unit.none ? null : limit[field]);
/** The text of a bound as it is shown and entered, empty where there is none. */
export const textOf = (limit, bound) => (boundOf(limit, bound) === null ? "" : bound[3].textOf(limit[bound[0]]));
export const isBound = (limit) => ROW_BOUNDS.some((bound) => boundOf(limit, bound) !== null);
export const isOfKey = (subject) => subject.startsWith("key:");

/** The name of a limit's subject; `keys` are names by id. */
export function subjectName(subject, keys = {}) {
  if (subject === "*") return "Whole project";
  return isOfKey(subject) ? keys[subject.slice(4)] || subject.slice(4) : subject;
}

const digitsOf = (text) => text.replace(/[\s,_.]/g, "");
const SIZE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A number of bytes in the largest unit in which two decimals hold it exactly. */
function sizeOf(bytes) {
  const power = [4, 3, 2, 1].find((each) => bytes >= 1024 ** each && Number((bytes / 1024 ** each).toFixed(2)) * 1024 ** each === bytes) || 0;
  return `${(bytes / 1024 ** power).toLocaleString("en-US", { maximumFractionDigits: 2 })} ${SIZE_UNITS[power]}`;
}

/** The bytes of "20 GiB", "20 G" or "1,500 B"; a number alone could be of any unit, and GB is another one. */
function parseSize(text) {
  const match = /^(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?\s*([BKMGT])(?:(?<!B)iB?)?$/i.exec(text);
  if (!match) return undefined;
  const power = SIZE_UNITS.findIndex((unit) => unit[0] === match[3].toUpperCase());
  const bytes = Math.round(Number(match[1].replace(/,/g, "") + (match[2] || "")) * 1024 ** power);
  return bytes < SIZES.none ? bytes : undefined;
}
