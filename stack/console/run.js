// One request in flight: reads its stream, reduces events once per animation frame, resumes what the server still runs.

import { ApiError, apiPath, cancelResponse, getShown, stream } from "./api.js";
import { TERMINAL, emptyState, reduce, stateOf } from "./reducer.js";

const RETRIES = 24;
const LONGEST_DELAY_MS = 5000;
/** Times that the end of a stopped response is asked for, each after twice the pause of the last, 6 s in all. */
const END_TRIES = 6;

export class Run {
  /** `onChange` is called at most once per frame with this run; `state`, `rows` and the times are then current. */
  constructor(request, onChange) {
    this.request = request;
    this.onChange = onChange;
    this.state = emptyState();
    this.rows = [];
    this.startedAt = performance.now();
    this.firstAt = undefined;
    this.endedAt = undefined;
    this.failure = null;
    /** True where all events were sent before: the times at which they come say nothing. */
    this.isReplay = false;
    /** {tries, after}: the connection is lost, and the stream is asked for again after that event; null while it flows. */
    this.waits = null;
    this.stops = new AbortController();
    this.isClosed = false;
    this.wasStopped = false;
    this.frame = 0;
  }

  /** A stop that the reader asked for: the response ends as `cancelled`. */
  get isStopped() {
    return this.wasStopped && this.state.response?.status === "cancelled";
  }

  get running() {
    return this.endedAt === undefined;
  }

  async start() {
    await this.read(() => stream("POST", "responses", { body: this.request, signal: this.stops.signal }));
  }

  /** Follow a stored response that runs in the background, from its first event or after `number`. */
  async follow(id, number) {
    const query = { stream: true, starting_after: number >= 0 ? number : undefined };
    await this.read(() => stream("GET", apiPath`responses/${id}`, { query, signal: this.stops.signal }));
  }

  async read(open) {
    for (let tries = 0; ; tries += 1) {
      let error = null;
      try {
        for await (const row of open()) {
          this.take(row);
          this.waits = null;
          tries = 0;
        }
      } catch (failure) {
        error = failure;
      }
      if (this.isOver(error)) break;
      if (!error && this.isStored && (await this.takeStored())) break; // a stream of a cancelled response has no last event
      if (!this.canResume(error) || tries >= RETRIES) {
        const wasRefused = error instanceof ApiError && error.status >= 400;
        this.failure = this.rows.length && !wasRefused ? new ApiError(0, { error: { message: this.isStored ? AWAY : LOST, code: "connection_lost" } }) : error;
        break;
      }
      const { id } = this.state.response;
      this.waits = { tries: tries + 1, after: this.state.lastNumber };
      this.changed();
      if (!(await this.pause(Math.min(LONGEST_DELAY_MS, 500 * 2 ** tries)))) break;
      const query = { stream: true, starting_after: this.waits.after >= 0 ? this.waits.after : undefined };
      open = () => stream("GET", apiPath`responses/${id}`, { query, signal: this.stops.signal });
    }
    this.waits = null;
    this.endedAt = performance.now();
    if (this.stops.signal.aborted) await this.readEnd();
    this.changed();
  }

  /** Take the end of a response that was stopped from the server, which stores it a moment later; without it, end here. */
  async readEnd() {
    const { response } = this.state;
    if (!response || this.isClosed || TERMINAL.has(response.status)) return;
    for (let tries = 0; response.store && tries < END_TRIES; tries += 1) {
      if (await this.takeStored()) return;
      await new Promise((resolve) => setTimeout(resolve, 100 * 2 ** tries));
    }
    const items = this.state.items.map((item) => (item?.status === "in_progress" ? { ...item, status: "incomplete" } : item));
    this.state = { ...this.state, items, response: { ...response, status: "cancelled" } };
  }

  /** Take the response from the store; false where it has not ended yet. */
  async takeStored() {
    const stored = await getShown(this.state.response.id).catch(() => null);
    if (!stored || !TERMINAL.has(stored.status)) return false;
    this.state = { ...stateOf(stored), meta: this.state.meta, lastNumber: this.state.lastNumber };
    return true;
  }

  /** True after the last event, after an error that ended the stream, and after `close` or `stop`. */
  isOver(error) {
    const status = this.state.response?.status;
    return error?.name === "AbortError" || (!error && (TERMINAL.has(status) || Boolean(this.state.error)));
  }

  get isStored() {
    return Boolean(this.state.response?.background);
  }

  /** A background response goes on without its reader. Refusals are final, but for those of a server that starts. */
  canResume(error) {
    const isRefused = error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429;
    return this.isStored && !TERMINAL.has(this.state.response.status) && !isRefused;
  }

  /** Wait; false if the run was stopped meanwhile. */
  pause(delay) {
    const { signal } = this.stops;
    return new Promise((resolve) => {
      const timer = setTimeout(() => resolve(!signal.aborted), delay);
      signal.addEventListener("abort", () => (clearTimeout(timer), resolve(false)), { once: true });
    });
  }

  take(row) {
    if (this.isReplay) row.at = undefined;
    this.rows.push(row);
    this.state = reduce(this.state, row.event, row.at ?? null);
    if (this.firstAt === undefined && row.event.type.endsWith(".delta")) this.firstAt = row.at;
    this.changed();
  }

  changed() {
    if (!this.frame) {
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.onChange(this);
      });
    }
  }

  /** Stop reading; a background response is cancelled on the server, any other ends as its client leaves. */
  async stop() {
    const { response } = this.state;
    this.wasStopped = true;
    if (response?.background && !TERMINAL.has(response.status)) await cancelResponse(response.id).catch(() => this.stops.abort());
    else this.stops.abort();
  }

  close() {
    this.isClosed = true;
    this.stops.abort();
    cancelAnimationFrame(this.frame);
  }
}

const LOST = "The connection broke off, and this response was not running in the background: what was not sent is lost. Ask again.";
const AWAY = "The connection broke off, and the server has not come back. The response is stored: open it in Responses when the server runs again.";

/** Return a run that shows a stored response; one that still runs in the background is followed from its first event. */
export async function storedRun(id, onChange) {
  const response = await getShown(id);
  const run = new Run(null, onChange);
  run.state = stateOf(response);
  if (response.background && !TERMINAL.has(response.status)) run.follow(id, -1);
  else run.endedAt = run.startedAt;
  return run;
}

/** Return a run that shows items which no response on the server has. */
export function itemsRun(items, onChange) {
  const run = new Run(null, onChange);
  run.state = stateOf({ id: null, status: "completed", store: false, output: items });
  run.endedAt = run.startedAt;
  return run;
}
