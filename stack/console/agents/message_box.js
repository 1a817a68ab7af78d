// A box for a message: Enter sends as in the Playground.

import { enterSends } from "../parts/composer.js";
import { html } from "../vendor/preact.js";

const isSend = (event) => event.key === "Enter" && !event.isComposing && (event.ctrlKey || event.metaKey || (enterSends() && !event.shiftKey));

/** `isOff` says that nothing can be sent yet, `isBusy` that something is being sent. */
export function MessageBox({ label, verb, placeholder, text, onText, onSend, isBusy, isOff, rows = 2, children }) {
  const mayPress = text.trim() && !isBusy && !isOff;
  const submit = (event) => {
    event.preventDefault();
    if (mayPress) onSend();
  };
  return html`<form class="composer" onSubmit=${submit}>
    <textarea rows=${rows} aria-label=${label} placeholder=${placeholder || `${label}…`} value=${text} onInput=${(event) => onText(event.target.value)} onKeyDown=${(event) => isSend(event) && submit(event)}></textarea>
    <div class="row">${children}<span class="grow"></span><span class="quiet small keyboard-only">${enterSends() ? "Enter" : "Ctrl + Enter"}</span><button class="primary" disabled=${!mayPress}>${verb}</button></div>
  </form>`;
}
