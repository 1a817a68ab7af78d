// The output of a call that the client runs: a form of the function's `output_schema` where it has one, else text.

import { pretty } from "../format.js";
import { violations } from "../schema/validate.js";
import { html, useState } from "../vendor/preact.js";
import { SchemaField, blank } from "./schema_form.js";

export function FunctionForm({ item, tool, onAnswer }) {
  const schema = tool?.output_schema;
  return schema ? html`<${OutputForm} item=${item} schema=${schema} onAnswer=${onAnswer} />` : html`<${OutputText} item=${item} onAnswer=${onAnswer} />`;
}

function OutputForm({ item, schema, onAnswer }) {
  const [value, setValue] = useState(() => blank(schema));
  const [asJson, setAsJson] = useState(false);
  const [tried, setTried] = useState(false);
  const found = violations(schema, value === undefined ? null : value);
  const submit = (event) => {
    event.preventDefault();
    setTried(true);
    if (!found.length) onAnswer(typeof value === "string" ? value : JSON.stringify(value));
  };
  return html`<form class="answer" onSubmit=${submit} aria-label="Output of ${item.name}">
    <div class="row"><b>Output of ${item.name}</b><span class="grow"></span><label class="check"><input type="checkbox" checked=${asJson} onChange=${(event) => setAsJson(event.target.checked)} /> as JSON</label></div>
    <${SchemaField} key=${asJson} schema=${asJson ? {} : schema} root=${schema} name=${asJson ? `${item.name} as JSON` : ""} value=${value} onChange=${setValue} />
    ${tried && found.length > 0 && html`<ul class="violations" role="alert">${found.map((each) => html`<li key=${each.path + each.rule}><code>${each.path || "/"}</code> ${each.message}</li>`)}</ul>`}
    <div class="row"><button class="primary">Send output</button><span class="quiet small">${found.length ? "" : "fits its schema"}</span></div>
    ${!asJson && html`<details class="small"><summary class="quiet">What is sent</summary><pre class="wrap output">${pretty(value)}</pre></details>`}
  </form>`;
}

function OutputText({ item, onAnswer }) {
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
