// Every event, and the response, held against the Open Responses schema (https://www.openresponses.org).
//
// That schema is closed; OpenAI's API has more: other tools, their items and events. What the schema does not know is
// `outside`, not a violation. Where OpenAI's names differ from the schema's, the difference is undone before the check:
// it is that of the header `x-responses-dialect: open-responses`.

import { violations } from "./validate.js";

const NAMES = {
  "response.reasoning_text.delta": "response.reasoning.delta",
  "response.reasoning_text.done": "response.reasoning.done",
};

let loading = null;

/** Load the schema once; return a promise of {version, events, schemas}. */
export function loadSchema() {
  loading ||= fetch(new URL("open_responses.json", import.meta.url)).then((answer) => {
    if (!answer.ok) throw new Error(`The schema cannot be loaded: status ${answer.status}.`);
    return answer.json();
  });
  loading.catch(() => (loading = null));
  return loading;
}

function inDialect(response) {
  const format = response?.text?.format;
  if (format?.type !== "json_schema") return response;
  return { ...response, text: { ...response.text, format: { ...format, schema: null } } };
}

/** Check an event: {found: [{path, rule, message}], outside: [path], known}. */
export function checkEvent(spec, event) {
  const type = NAMES[event.type] || event.type;
  const name = spec.events[type];
  if (!name) return { found: [], outside: [event.type], known: false };
  const value = type === event.type ? event : { ...event, type };
  return checkAgainst(spec, name, value.response ? { ...value, response: inDialect(value.response) } : value);
}

export const checkResponse = (spec, response) => checkAgainst(spec, "ResponseResource", inDialect(response));

function checkAgainst(spec, name, value) {
  const outside = [];
  const found = violations(spec.schemas[name], value, { root: spec.schemas, outside });
  return { found, outside, known: true };
}

const SLICE_MS = 5;

/** Checks the rows of one stream as they come, a few milliseconds at a time. */
export class Conformance {
  constructor() {
    this.restart(null);
  }

  restart(rows) {
    this.rows = rows;
    this.next = 0;
    this.valid = 0;
    this.outside = 0;
    this.bad = new Map();
  }

  /** Go on checking `rows`; return the rows that are left. `bad` maps the event that breaks the schema to its result. */
  advance(spec, rows) {
    if (rows !== this.rows) this.restart(rows);
    const end = performance.now() + SLICE_MS;
    while (this.next < rows.length && performance.now() < end) {
      const { event } = rows[this.next];
      const result = checkEvent(spec, event);
      if (result.found.length) this.bad.set(event, result);
      else if (result.outside.length) this.outside += 1;
      else this.valid += 1;
      this.next += 1;
    }
    return rows.length - this.next;
  }
}
