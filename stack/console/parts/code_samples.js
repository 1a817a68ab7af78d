// "View code": curl, Python and JavaScript of one request.

import { baseUrl } from "../api.js";
import { pretty } from "../format.js";
import { readKey } from "../session.js";
import { html, useState } from "../vendor/preact.js";
import { Copy, Tabs } from "./states.js";

const shellQuote = (text) => `'${text.replace(/'/g, "'\\''")}'`;

/** A JSON value as a Python literal. */
export function python(value, indent = 0) {
  const pad = " ".repeat(indent + 4);
  const end = `\n${" ".repeat(indent)}`;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((child) => `${pad}${python(child, indent + 4)},`).join("\n")}${end}]` : "[]";
  if (typeof value === "object") {
    const entries = Object.entries(value);
    return entries.length ? `{\n${entries.map(([key, child]) => `${pad}${JSON.stringify(key)}: ${python(child, indent + 4)},`).join("\n")}${end}}` : "{}";
  }
  return JSON.stringify(value);
}

/** What the programs call their answers, and how they show them. */
const APIS = {
  responses: {
    name: (body) => (body.stream ? "events" : "response"),
    python: (body) =>
      body.stream ? 'for event in events:\n    if event.type == "response.output_text.delta":\n        print(event.delta, end="", flush=True)' : "print(response.output_text)",
    javascript: (body) =>
      body.stream
        ? 'for await (const event of events) {\n  if (event.type === "response.output_text.delta") process.stdout.write(event.delta);\n}'
        : "console.log(response.output_text);",
  },
  decisions: { name: () => "decision", python: () => "for answer in decision.answers:\n    print(answer)", javascript: () => "console.log(decision.answers);" },
};

/** Programs of a request. The SDKs demand a key; a server that asks for none takes every one. */
export const SAMPLES = {
  curl: (body, api) => `curl ${baseUrl}/${api} \\
${readKey() ? '  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n' : ""}  -H "Content-Type: application/json" \\
  -d ${shellQuote(pretty(body))}`,
  Python: (body, api) => `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(baseUrl)}${readKey() ? "" : ', api_key="none"'})
${APIS[api].name(body)} = client.${api}.create(
${Object.entries(body).map(([key, value]) => `    ${key}=${python(value, 4)},`).join("\n")}
)
${APIS[api].python(body)}
`,
  JavaScript: (body, api) => `import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${JSON.stringify(baseUrl)}${readKey() ? "" : ', apiKey: "none"'} });
const ${APIS[api].name(body)} = await client.${api}.create(${pretty(body)});
${APIS[api].javascript(body)}
`,
};

/** `api` names the resource of the SDK. */
export function CodeSamples({ body, api = "responses" }) {
  const [language, setLanguage] = useState("Python");
  const code = SAMPLES[language](body, api);
  return html`<${Tabs} names=${Object.keys(SAMPLES)} current=${language} onChange=${setLanguage} label="Language">
    <div class="cell"><${Copy} text=${code} label="Copy the code" /><pre class="wrap code" tabindex="0">${code}</pre></div>
  <//>`;
}
