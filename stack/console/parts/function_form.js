// The output of a call that the client runs: JSON or text, checked for what it is before it is sent.

import { html, useState } from "../vendor/preact.js";

export function FunctionForm({ item, onAnswer }) {
  const [text, setText] = useState("");
  const isJson = (() => {
    try {
      JSON.parse(text);
      return true;
    } catch {
      return false;
    }
  })();
  const submit = (event) => {
    event.preventDefault();
    onAnswer(text);
  };
  return html`<form class="answer" onSubmit=${submit}>
    <label>Output of ${item.name || "this call"}
      <textarea rows="3" class="mono" placeholder='{"temperature": 21}' value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
    </label>
    <div class="row"><button class="primary" disabled=${!text}>Send output</button><span class="quiet small">${text ? (isJson ? "JSON" : "plain text") : ""}</span></div>
  </form>`;
}
