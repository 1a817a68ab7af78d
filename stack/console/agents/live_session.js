// One session as it is followed: its newest items, then its events, again and again after a lost connection.

import { ApiError, apiPath } from "../api.js";
import { follow, read, write } from "./api.js";
import { MOST_ITEMS, emptySession, hasEnded, reduce, withSubagent, withSubagentItems, withTurns } from "./session_state.js";

const PAGE = 50;
const TURNS = 20;
const LONGEST_DELAY_MS = 5000;
const LOADS = 4;
/** A browser has six connections to a server for all of its tabs: one that nobody looks at gives up its own after this time. */
const HIDDEN_MS = 30_000;

const isRefusal = (error) => error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429;
/** The number before the first event of a turn that has not ended; undefined for what follows from now on. */
const numberBefore = (turn) => (turn && !hasEnded(turn) && turn.sequence_number ? turn.sequence_number - 1 : undefined);

export class LiveSession {
  /** `onChange` is called at most once per frame. */
  constructor(id, onChange) {
    this.path = apiPath`agents/sessions/${id}`;
    this.onChange = onChange;
    this.state = emptySession();
    /** The error that ends it: the session is not there, or may not be read. */
    this.failure = null;
    /** The number of the next try while the connection is lost; 0 while events flow. */
    this.tries = 0;
    this.oldestTurn = null;
    this.isClosed = false;
    this.connection = new AbortController();
    this.frame = 0;
    this.awake = Promise.resolve();
    this.wake = () => {};
    this.sleepTimer = 0;
    this.visibilityChanged = () => {
      clearTimeout(this.sleepTimer);
      if (document.visibilityState === "hidden") this.sleepTimer = setTimeout(() => this.sleep(), HIDDEN_MS);
      else this.wake();
    };
  }

  /** End the connection until the tab is seen again; what comes meanwhile is read then. */
  sleep() {
    this.awake = new Promise((resolve) => (this.wake = resolve));
    this.connection.abort();
  }

  async start() {
    document.addEventListener("visibilitychange", this.visibilityChanged);
    while (!this.isClosed) {
      await this.awake;
      const error = await this.read();
      if (this.isClosed) return;
      if (error?.name === "AbortError") continue; // it begins again at the newest items
      if (isRefusal(error)) {
        if (error.status !== 400 || this.state.lastNumber === undefined) {
          this.failure = error;
          this.changed();
          return;
        }
        this.state = { ...this.state, lastNumber: undefined }; // those events are no longer stored
      }
      this.tries += 1;
      this.changed();
      await new Promise((resolve) => setTimeout(resolve, Math.min(LONGEST_DELAY_MS, 250 * 2 ** this.tries)));
    }
  }

  /** Take events until the connection ends; return the error that ended it. */
  async read() {
    try {
      const { lastNumber } = this.state;
      const events = lastNumber === undefined ? await this.load() : await this.connect(lastNumber);
      this.tries = 0;
      this.changed();
      for await (const { event } of events) {
        this.state = reduce(this.state, event);
        this.changed();
      }
      return null;
    } catch (error) {
      return error;
    }
  }

  connect(number) {
    this.connection.abort();
    this.connection = new AbortController();
    return follow(`${this.path}/events`, { starting_after: number }, this.connection.signal);
  }

  /** Open the events first and read the newest items then, so that nothing is between them. */
  async load() {
    let turns = (await read(`${this.path}/turns`, { limit: 1 })).data;
    for (let tries = 1; ; tries += 1) {
      const number = numberBefore(turns[0]);
      let isReplay = number !== undefined;
      const events = await this.connect(number).catch((error) => {
        if (!isReplay || error.status !== 400) throw error;
        isReplay = false; // its first events are no longer stored
        return this.connect(undefined);
      });
      const [session, items, page] = await Promise.all([read(this.path), read(`${this.path}/items`, { limit: PAGE }), read(`${this.path}/turns`, { limit: TURNS })]);
      turns = page.data;
      // a turn that began meanwhile has events that this connection does not send
      if (numberBefore(turns[0]) !== number && number === undefined && tries < LOADS) continue;
      const { environment } = this.state;
      if (hasEnded(this.state.turns.get(turns[0]?.id) || { status: "" })) {
        this.state = { ...this.state, session }; // nothing has happened since: what is shown stays
        return events;
      }
      const lastRead = (isReplay && items.data[0]?.id) || null;
      this.state = withTurns({ ...emptySession(), environment, session, items: items.data.reverse(), hasEarlier: items.has_more, lastRead }, turns);
      this.oldestTurn = page.has_more ? turns.at(-1).id : null;
      await this.loadTurns();
      await this.loadSubagents();
      return events;
    }
  }

  /** Load the subagents and the newest turn of each: an event of one names its turn alone. */
  async loadSubagents() {
    if (!this.state.session.agent.multi_agent?.enabled) return;
    const { data } = await read(`${this.path}/subagents`, { limit: 100 });
    const pages = await Promise.all(data.map(({ id }) => read(`${this.path}${apiPath`/subagents/${id}/turns`}`, { limit: 1 })));
    for (const subagent of data) this.state = withSubagent(this.state, subagent.id, () => ({ subagent }));
    this.state = withTurns(this.state, pages.flatMap((page) => page.data));
  }

  /** Load the newest items of a subagent, whose live ones are here only since the page follows the session. */
  async readSubagent(id) {
    const page = await read(`${this.path}${apiPath`/subagents/${id}/items`}`, { limit: PAGE });
    this.state = withSubagentItems(this.state, id, page.data.reverse(), page.has_more);
    this.changed();
  }

  /** Load the turns of the items that are shown. */
  async loadTurns() {
    while (this.oldestTurn && this.state.items.some(({ turn_id: id }) => !this.state.turns.has(id))) {
      const page = await read(`${this.path}/turns`, { limit: 100, after: this.oldestTurn });
      this.state = withTurns(this.state, page.data);
      this.oldestTurn = page.has_more ? page.data.at(-1).id : null;
    }
  }

  async showEarlier() {
    const page = await read(`${this.path}/items`, { limit: PAGE, after: this.state.items[0].id });
    const items = [...page.data.reverse(), ...this.state.items];
    const isAtEnd = this.state.isAtEnd && items.length <= MOST_ITEMS;
    this.state = { ...this.state, items: items.slice(0, MOST_ITEMS), hasEarlier: page.has_more, isAtEnd };
    await this.loadTurns();
    this.changed();
  }

  async showLater() {
    const page = await read(`${this.path}/items`, { limit: PAGE, order: "asc", after: this.state.items.at(-1).id });
    if (!page.has_more) return this.showNewest();
    const items = [...this.state.items, ...page.data];
    this.state = { ...this.state, items: items.slice(-MOST_ITEMS), hasEarlier: this.state.hasEarlier || items.length > MOST_ITEMS };
    return this.changed();
  }

  /** Begin again at the newest items. */
  showNewest() {
    this.state = { ...this.state, lastNumber: undefined, turns: new Map() };
    this.connection.abort();
  }

  /** Send events once; `key` is the same for a second try after an answer that was lost. */
  send(events, key) {
    return write(`${this.path}/events`, { events }, key);
  }

  /** Answer a call that waits. One that waits no longer is not shown any more, and its error is thrown. */
  async answer(action, event) {
    try {
      await this.send([event]);
      const { session } = this.state;
      this.state = { ...this.state, session: { ...session, required_actions: session.required_actions.filter((each) => each !== action) } };
    } catch (error) {
      if (error.status === 400) this.state = { ...this.state, session: await read(this.path) };
      throw error;
    } finally {
      this.changed();
    }
  }

  changed() {
    if (this.isClosed || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.onChange();
    });
  }

  close() {
    this.isClosed = true;
    document.removeEventListener("visibilitychange", this.visibilityChanged);
    clearTimeout(this.sleepTimer);
    this.wake();
    this.connection.abort();
    cancelAnimationFrame(this.frame);
  }
}
