// Every event of a stream: number, time offset, type, size. Only the rows in sight are in the page.

import { bytes, count, ms } from "../format.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { useFollowEnd } from "./follow_end.js";
import { JsonTree } from "./json_tree.js";
import { EventViolations } from "./schema_report.js";

const ROW = 22;
const isDelta = (type) => type.endsWith(".delta");

/** The lines of a list of events: rows are read once as they come, and all of them again when the wish changes.
 * `join` puts deltas of one item and type that follow each other into one line. */
class Lines {
  constructor() {
    this.rows = null;
    this.wish = "";
  }

  advance(rows, { filter, itemId, join, bad }) {
    const wish = JSON.stringify([filter, itemId, join, bad.size]);
    if (rows !== this.rows || wish !== this.wish) Object.assign(this, { rows, wish, next: 0, lines: [] });
    for (; this.next < rows.length; this.next += 1) {
      const row = rows[this.next];
      const { event } = row;
      if (filter && !event.type.includes(filter)) continue;
      if (itemId && (event.item_id || event.item?.id) !== itemId) continue;
      const last = this.lines.at(-1);
      if (join && last && isDelta(event.type) && last.event.type === event.type && last.event.item_id === event.item_id && !bad.has(event) && !bad.has(last.event)) {
        last.more += 1;
        last.size += row.size;
      } else this.lines.push({ event, at: row.at, size: row.size, more: 0 });
    }
    return this.lines;
  }
}

export function EventList({ rows, startedAt, itemId, onItem, selected, onEvent, bad, replay }) {
  const [filter, setFilter] = useState("");
  const [join, setJoin] = useState(true);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(400);
  const { box, content, follows, scrolled } = useFollowEnd(ROW);
  const reader = useRef(null);
  reader.current ||= new Lines();
  const lines = reader.current.advance(rows, { filter, itemId, join, bad });
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setHeight(entry.contentRect.height));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const onScroll = () => {
    scrolled();
    setTop(box.current.scrollTop);
  };
  const first = Math.max(0, Math.floor(top / ROW) - 10);
  const shown = lines.slice(first, first + Math.ceil(height / ROW) + 20);
  const select = (event) => {
    follows.current = false;
    onEvent(event);
    onItem?.(event.item_id || event.item?.id || null);
  };
  /** Arrow keys move the selection; the list scrolls with it. */
  const moved = (press) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity }[press.key];
    if (!by || !lines.length) return;
    press.preventDefault();
    const now = lines.findIndex((line) => line.event === selected);
    const index = Math.min(lines.length - 1, Math.max(0, (now < 0 ? -1 : now) + by));
    follows.current = false;
    onEvent(lines[index].event);
    const { scrollTop, clientHeight } = box.current;
    if (index * ROW < scrollTop) box.current.scrollTop = index * ROW;
    else if ((index + 1) * ROW > scrollTop + clientHeight) box.current.scrollTop = (index + 1) * ROW - clientHeight;
  };
  return html`<div class="events ${startedAt === undefined ? "untimed" : ""}">
    <div class="row tools">
      <input type="search" placeholder="Filter by type" aria-label="Filter events by type" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <label class="check"><input type="checkbox" checked=${join} onChange=${(event) => setJoin(event.target.checked)} /> join deltas</label>
      <span class="quiet small tabular" title="events">${count(rows.length)}</span>
    </div>
    ${replay && html`<${Replay} ...${replay} />`}
    ${itemId && html`<p class="row small quiet">of one item <button type="button" class="plain" onClick=${() => onItem?.(null)}>show all</button></p>`}
    <div class="list mono" ref=${box} onScroll=${onScroll} onKeyDown=${moved} tabindex="0" role="group" aria-label="Events, arrow keys select">
      <div ref=${content} style=${{ height: `${lines.length * ROW}px` }}>
        <div style=${{ transform: `translateY(${first * ROW}px)` }}>
          ${shown.map(
            (line, index) => html`<button
              key=${first + index}
              type="button"
              tabindex="-1"
              class="event ${selected === line.event ? "on" : ""} ${/failed|error/.test(line.event.type) ? "bad" : ""}"
              onClick=${() => select(line.event)}
              ><span>${line.event.sequence_number ?? ""}</span
              ><span>${startedAt === undefined || line.at === undefined ? "" : ms(line.at - startedAt)}</span
              ><span class="type ${bad.has(line.event) ? "broken" : ""}" title=${line.event.type}>${bad.has(line.event) ? "✕ " : ""}<${Type} name=${line.event.type.replace(/^response\./, "")} />${line.more ? html` <span class="quiet">+${line.more}</span>` : ""}</span
              ><span>${bytes(line.size)}</span></button
            >`,
          )}
        </div>
      </div>
    </div>
    ${selected &&
    html`<div class="detail" tabindex="0" role="region" aria-label="The selected event">
      ${bad.has(selected) && html`<${EventViolations} result=${bad.get(selected)} />`}
      <${JsonTree} value=${selected} open=${3} key=${selected.sequence_number} />
    </div>`}
  </div>`;
}

/** The type of an event; one that is too long is cut in front of its last word, by which events differ. */
function Type({ name }) {
  const at = name.lastIndexOf(".");
  return at < 0 ? name : html`<i class="clip">${name.slice(0, at)}</i><i>${name.slice(at)}</i>`;
}

/** Ask the server to send the events of a stored response again, after a number. */
function Replay({ after, start, clear }) {
  const [number, setNumber] = useState(after ?? "");
  const submit = (event) => {
    event.preventDefault();
    if (number !== "") start(Number(number));
  };
  return html`<form class="row tools replay" onSubmit=${submit}>
    <label class="check">Replay after number
      <input type="number" min="0" step="1" class="tabular" value=${number} onInput=${(event) => setNumber(event.target.value)} />
    </label>
    <button disabled=${number === ""}>Replay</button>
    ${after !== undefined && html`<button type="button" class="plain" onClick=${clear}>All events</button>`}
  </form>`;
}
