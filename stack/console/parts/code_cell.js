// A program of the code interpreter with its streams, tracebacks and pictures.

import { html } from "../vendor/preact.js";
import { Output } from "./lane.js";
import { Copy } from "./states.js";

export function CodeCell({ item }) {
  return html`<div class="cell">
      <${Copy} text=${() => item.code || ""} label="Copy the program" />
      <pre class="wrap code" tabindex="0" aria-label="program">${item.code}</pre>
    </div>
    ${(item.outputs || []).map((output, index) =>
      output.type === "image" && (output.url || "").startsWith("data:image/")
        ? html`<img key=${index} class="attached" src=${output.url} alt="picture made by the program" />`
        : html`<${Output} key=${index} text=${output.logs ?? output.url ?? ""} />`,
    )}
    ${item.container_id && html`<p class="quiet small mono">${item.container_id}</p>`}`;
}
