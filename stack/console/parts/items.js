// One output item as a lane: reasoning, message, tool call, whatever its type. Unknown types show as JSON.

import { ms } from "../format.js";
import { html, useErrorBoundary, useState } from "../vendor/preact.js";
import { Part } from "./content.js";
import { Growing } from "./growing.js";
import { Icon } from "./icons.js";
import { Lane } from "./lane.js";
import { Markdown } from "./markdown.js";
import { Status } from "./states.js";
import { ToolCard } from "./tool_card.js";

/** The output items of a response. `meta[i]` has the times of item i; `actions` answers calls, see tool_card.js. */
export function Items({ items, meta = [], running, selected, onSelect, actions, tools, model }) {
  return html`${items.map(
    (item, index) =>
      item &&
      html`<${Item}
        key=${item.id || index}
        item=${item}
        meta=${meta[index] || {}}
        running=${running && meta[index]?.endedAt === undefined}
        selected=${selected && selected === item.id}
        onSelect=${onSelect}
        actions=${actions}
        tools=${tools}
        model=${model}
      />`,
  )}`;
}

export function Item({ item, meta = {}, running, selected, onSelect, actions, tools, model }) {
  const [broken] = useErrorBoundary((bug) => console.error(bug));
  if (broken) return html`<section class="item failure">This item cannot be shown: ${broken.message}</section>`;
  const elapsed = Number.isFinite(meta.endedAt) && Number.isFinite(meta.startedAt) ? meta.endedAt - meta.startedAt : undefined;
  const common = { item, meta, running, elapsed, actions, tools, model, picks: Boolean(onSelect && item.id) };
  return html`<section class="item ${item.type} ${selected ? "selected" : ""}" data-item=${item.id} onClick=${(event) => !event.target.closest("form, input, a") && onSelect?.(item.id)}>
    ${item.type === "message"
      ? html`<${Message} ...${common} />`
      : item.type === "reasoning"
        ? html`<${Reasoning} ...${common} />`
        : item.type === "compaction"
          ? html`<${Lane} label="compaction" ...${common}><p class="quiet small">Earlier turns were condensed into this item.</p><//>`
          : html`<${ToolCard} ...${common} />`}
  </section>`;
}

function Message({ item, running, picks, model }) {
  const parts = item.content || [];
  const label = { assistant: model || "Assistant", user: "You" }[item.role] || item.role || "message";
  if (typeof parts === "string") return html`<${Lane} label=${label} icon="message"><${Markdown} text=${parts} /><//>`;
  return html`<${Lane} label=${item.phase ? `${label} · ${item.phase}` : label} icon="message" status=${item.status} picks=${picks}>
    ${parts.map(
      (part, index) => html`<div key=${index} aria-live=${running ? "off" : "polite"}>
        ${part && html`<${Part} part=${part} grows=${running} />`}${running && index === parts.length - 1 && html`<span class="caret" aria-hidden="true"></span>`}
      </div>`,
    )}
  <//>`;
}

function Reasoning({ item, running, elapsed }) {
  const [open, setOpen] = useState(false);
  const text = (item.content || []).map((part) => part?.text || "").join("\n\n");
  const summary = (item.summary || []).map((part) => part?.text || "").join("\n\n");
  const shown = summary || text;
  return html`<details class="reasoning-fold" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary><${Icon} name="reasoning" /><b>${elapsed === undefined ? "reasoning" : `thought for ${ms(elapsed)}`}</b>
      ${running ? html`<${Status} status="running" />` : ""}
      ${!open && html`<span class="quiet clip">${shown.slice(-160)}</span>`}
    </summary>
    ${open &&
    html`<div class="thought">
      ${summary && html`<${Markdown} text=${summary} grows=${running} />`}
      ${text && summary && html`<h4 class="quiet">Reasoning text</h4>`}${text && html`<div class="mono"><${Growing} text=${text} /></div>`}
      ${!shown && html`<p class="quiet">${item.encrypted_content ? "Sealed: only the server can read it." : "Hidden."}</p>`}
    </div>`}
  </details>`;
}
