// One request in flight: reads its stream, reduces events once per animation frame, resumes what the server still runs.

import { ApiError, cancelResponse, get, stream } from "./api.js";
import { TERMINAL, emptyState, reduce } from "./reducer.js";

const RETRIES = 5;

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
    this.stops = new AbortController();
    this.frame = 0;
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
    await this.read(() => stream("GET", `responses/${id}`, { query, signal: this.stops.signal }));
  }

  async read(open) {
    for (let tries = 0; ; tries += 1) {
      try {
        for await (const row of open()) this.take(row);
        break;
      } catch (error) {
        if (error.name === "AbortError") break;
        const id = this.state.response?.id;
        const goesOn = this.state.response?.background && !TERMINAL.has(this.state.response.status);
        if (!goesOn || tries >= RETRIES || (error instanceof ApiError && error.status >= 400 && error.status < 500)) {
          this.failure = this.rows.length && !(error instanceof ApiError) ? new ApiError(0, { error: { message: LOST } }) : error;
          break;
        }
        await new Promise((resolve) => setTimeout(resolve, 500 * 2 ** tries));
        const query = { stream: true, starting_after: this.state.lastNumber };
        open = () => stream("GET", `responses/${id}`, { query, signal: this.stops.signal });
      }
    }
    this.endedAt = performance.now();
    this.changed();
  }

  take(row) {
    this.rows.push(row);
    this.state = reduce(this.state, row.event, row.at);
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
    if (response?.background && !TERMINAL.has(response.status)) await cancelResponse(response.id).catch(() => {});
    else this.stops.abort();
  }

  close() {
    this.stops.abort();
    cancelAnimationFrame(this.frame);
  }
}

const LOST = "The connection broke off, and this response was not running in the background: what was not sent is lost. Ask again.";

/** Return a run that shows a stored response, with its recorded events where the server has them. */
export async function storedRun(id, onChange) {
  const response = await get(`responses/${id}`);
  const run = new Run(null, onChange);
  run.state = { ...emptyState(), response, items: response.output, meta: response.output.map(() => ({})) };
  run.endedAt = run.startedAt;
  return run;
}
