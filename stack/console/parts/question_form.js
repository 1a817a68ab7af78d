// One question of a decision as a form: its kind, its text, and the options of a choice or a score.

import { KINDS, newOption } from "../decisions.js";
import { html } from "../vendor/preact.js";
import { Icon } from "./icons.js";

const MOST_OPTIONS = 255;
const PLACEHOLDERS = { predicate: "A statement that may be true of the input", choice: "Which of the choices fits the input?", score: "At which of the levels is the input?" };

export function QuestionForm({ question, number, onChange, onRemove }) {
  const { kind, options } = question;
  const set = (name) => (event) => onChange({ ...question, [name]: event.target.value });
  const setOption = (index, name) => (event) => onChange({ ...question, options: options.map((option, at) => (at === index ? { ...option, [name]: event.target.value } : option)) });
  const drop = (index) => onChange({ ...question, options: options.filter((_, at) => at !== index) });
  const word = kind === "choice" ? "Choice" : "Level";
  return html`<div class="asked" role="group" aria-label="Question ${number}">
    <div class="row">
      <select aria-label="Kind of question ${number}" value=${kind} onChange=${set("kind")}>
        ${Object.entries(KINDS).map(([name, label]) => html`<option key=${name} value=${name}>${label}</option>`)}
      </select>
      <input class="name" aria-label="Name of question ${number}" placeholder="name" value=${question.name} onInput=${set("name")} />
      <span class="grow"></span>
      ${onRemove && html`<button type="button" class="plain" aria-label="Remove question ${number}" onClick=${onRemove}><${Icon} name="close" /></button>`}
    </div>
    <textarea aria-label="Text of question ${number}" rows="2" placeholder=${PLACEHOLDERS[kind]} value=${question.instructions} onInput=${set("instructions")}></textarea>
    ${kind !== "predicate" &&
    html`<ol class="options" start=${kind === "score" ? 0 : 1}>
      ${options.map(
        ({ id, text, note }, index) => html`<li key=${id}>
          <span class="row">
            <input aria-label="${word} ${index + 1} of question ${number}" placeholder=${word.toLowerCase()} value=${text} onInput=${setOption(index, "text")} />
            <input class="grow" aria-label="Description of ${word.toLowerCase()} ${index + 1} of question ${number}" placeholder="description" value=${note} onInput=${setOption(index, "note")} />
            <button type="button" class="plain" aria-label="Remove ${word.toLowerCase()} ${index + 1} of question ${number}" disabled=${options.length <= 2} onClick=${() => drop(index)}><${Icon} name="close" /></button>
          </span>
        </li>`,
      )}
    </ol>
    <button type="button" class="plain" disabled=${options.length >= MOST_OPTIONS} onClick=${() => onChange({ ...question, options: [...options, newOption()] })}><${Icon} name="plus" /> Add a ${word.toLowerCase()}</button>`}
  </div>`;
}
