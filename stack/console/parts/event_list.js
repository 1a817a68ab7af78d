// Every event of a stream: number, time offset, type, size. Only the rows in sight are in the page.

import { bytes, count, ms } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { JsonTree } from "./json_tree.js";

const ROW = 22;
const isDelta = (type) => type.endsWith(".delta");

/** Join deltas of one item and type that follow each other into one row. */
function joined(rows) {
  const lines = [];
  for (const row of rows) {
    const last = lines.at(-1);
    if (last && isDelta(row.event.type) && last.event.type === row.event.type && last.event.item_id === row.event.item_id) {
      last.more += 1;
      last.size += row.size;
    } else lines.push({ ...row, more: 0 });
  }
  return lines;
}

export function EventList({ rows, startedAt, itemId, onItem }) {
  const [filter, setFilter] = useState("");
  const [join, setJoin] = useState(true);
  const [selected, setSelected] = useState(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(400);
  const box = useRef(null);
  const follows = useRef(true);
  const lines = useMemo(() => {
    const wanted = rows.filter(
      ({ event }) => (!filter || event.type.includes(filter)) && (!itemId || (event.item_id || event.item?.id) === itemId),
    );
    return join ? joined(wanted) : wanted;
  }, [rows, rows.length, filter, join, itemId]);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setHeight(entry.contentRect.height));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (follows.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines.length]);
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    follows.current = scrollHeight - scrollTop - clientHeight < ROW;
    setTop(scrollTop);
  };
  const first = Math.max(0, Math.floor(top / ROW) - 10);
  const shown = lines.slice(first, first + Math.ceil(height / ROW) + 20);
  const select = (line) => {
    setSelected(line);
    onItem?.(line.event.item_id || line.event.item?.id || null);
  };
  return html`<div class="events">
    <div class="row tools">
      <input type="search" placeholder="Filter by type" aria-label="Filter events by type" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <label class="check"><input type="checkbox" checked=${join} onChange=${(event) => setJoin(event.target.checked)} /> join deltas</label>
      <span class="quiet small tabular">${count(rows.length)}</span>
    </div>
    <div class="list mono" ref=${box} onScroll=${scrolled} tabindex="0" role="group" aria-label="Events">
      <div style=${{ height: `${lines.length * ROW}px` }}>
        <div style=${{ transform: `translateY(${first * ROW}px)` }}>
          ${shown.map(
            (line, index) => html`<button
              key=${first + index}
              type="button"
              class="event ${selected?.event === line.event ? "on" : ""} ${/failed|error/.test(line.event.type) ? "bad" : ""}"
              onClick=${() => select(line)}
              ><span>${line.event.sequence_number ?? ""}</span><span>${startedAt === undefined || line.at === undefined ? "" : ms(line.at - startedAt)}</span
              ><span>${line.event.type.replace(/^response\./, "")}${line.more ? html` <span class="quiet">+${line.more}</span>` : ""}</span
              ><span>${bytes(line.size)}</span></button
            >`,
          )}
        </div>
      </div>
    </div>
    ${selected && html`<div class="detail"><${JsonTree} value=${selected.event} open=${3} key=${selected.event.sequence_number} /></div>`}
  </div>`;
}
