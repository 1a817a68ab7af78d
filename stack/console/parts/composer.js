// The box to write in: text, pictures and files by drop, paste or choice; Enter or Ctrl+Enter sends, Escape stops.

import { bytes } from "../format.js";
import { readPreference } from "../settings.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Thumbnail } from "./content.js";
import { Icon } from "./icons.js";
import { Dictation } from "./voice.js";

const MOST_BYTES = 20 * 1024 ** 2;

function readDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function partOf(file) {
  const data = await readDataUrl(file);
  if (file.type.startsWith("image/")) return { type: "input_image", image_url: data, detail: "auto" };
  return { type: "input_file", filename: file.name, file_data: data };
}

/** Enter sends, unless its user wants Ctrl+Enter; on a screen without a keyboard it begins a line. */
export const enterSends = () => readPreference("enter", !matchMedia("(pointer: coarse)").matches);

function isSend(event) {
  if (event.key !== "Enter" || event.isComposing) return false;
  return event.ctrlKey || event.metaKey || (enterSends() && !event.shiftKey);
}

/** `tools` are the names of the tools that are on; `onTools` shows their switches; `preset` is {names, current, choose(name)}. */
export function Composer({ draft, onDraft, running, onStop, onSend, onCancelEdit, tools, onTools, preset }) {
  const [over, setOver] = useState(false);
  const [problem, setProblem] = useState("");
  const chooser = useRef(null);
  const box = useRef(null);
  const { text, parts } = draft;
  const isEdit = draft.editing !== undefined;
  useEffect(() => void (isEdit && box.current.focus()), [isEdit, draft.editing]);

  const add = async (files) => {
    const chosen = [...files];
    const large = chosen.find((file) => file.size > MOST_BYTES);
    setProblem(large ? `${large.name} has ${bytes(large.size)}: upload it in Files and search in it instead.` : "");
    const added = await Promise.all(chosen.filter((file) => file.size <= MOST_BYTES).map(partOf));
    onDraft({ ...draft, parts: [...parts, ...added] });
  };
  const submit = (event) => {
    event?.preventDefault();
    if (running || !(text.trim() || parts.length)) return;
    onSend(text, parts);
  };
  const dropped = (event) => {
    event.preventDefault();
    setOver(false);
    add(event.dataTransfer.files);
  };
  const pasted = (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      add(event.clipboardData.files);
    }
  };
  return html`<form
    class="composer ${over ? "over" : ""}"
    onSubmit=${submit}
    onDragOver=${(event) => (event.preventDefault(), setOver(true))}
    onDragLeave=${() => setOver(false)}
    onDrop=${dropped}
  >
    ${isEdit &&
    html`<div class="row small"><span class="quiet">You edit an earlier question. The turns after it stay, as another branch.</span><span class="grow"></span>
      <button type="button" class="plain" onClick=${onCancelEdit}>Cancel</button></div>`}
    ${parts.length > 0 &&
    html`<div class="row wrap">
      ${parts.map(
        (part, index) => html`<span class="chip" key=${index}
          ><${Thumbnail} part=${part} /><button type="button" class="plain" aria-label="Remove ${part.filename || "the picture"}" onClick=${() => onDraft({ ...draft, parts: parts.filter((_, other) => other !== index) })}><${Icon} name="close" /></button
        ></span>`,
      )}
    </div>`}
    ${problem && html`<p class="bad small">${problem}</p>`}
    <textarea
      aria-label="Message"
      placeholder="Ask…"
      rows="2"
      ref=${box}
      value=${text}
      onInput=${(event) => onDraft({ ...draft, text: event.target.value })}
      onPaste=${pasted}
      onKeyDown=${(event) => isSend(event) && submit(event)}
    ></textarea>
    <div class="row">
      <input ref=${chooser} type="file" multiple hidden aria-hidden="true" tabindex="-1" onChange=${(event) => add(event.target.files)} />
      <button type="button" class="plain" onClick=${() => chooser.current.click()}><${Icon} name="attach" /> Attach</button>
      <button type="button" class="plain" title=${tools.join(", ") || "No tool is on"} onClick=${onTools}><${Icon} name="tool" /> Tools${tools.length ? html` <span class="count tabular">${tools.length}</span>` : ""}</button>
      ${preset.names.length > 0 &&
      html`<select class="plain-select" aria-label="Saved instructions" value=${preset.current} onChange=${(event) => preset.choose(event.target.value)}>
        <option value="">${preset.current === "" && preset.isOwn ? "own instructions" : "no instructions"}</option>${preset.names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>`}
      <${Dictation} onText=${(heard) => onDraft({ ...draft, text: `${text}${text && !/\s$/.test(text) ? " " : ""}${heard}` })} />
      <span class="grow"></span>
      <span class="quiet small keyboard-only">${enterSends() ? "Enter" : "Ctrl + Enter"}</span>
      ${running ? html`<button type="button" onClick=${onStop}>Stop</button>` : html`<button class="primary" disabled=${!text.trim() && !parts.length}>Send</button>`}
    </div>
  </form>`;
}
