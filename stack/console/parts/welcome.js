// The first sight of the Playground: something to begin with.

import { html } from "../vendor/preact.js";
import { Empty } from "./states.js";

const EXAMPLES = ["Name three rivers of France.", "Explain a mutex to a child.", "Write a haiku about caches."];

export const Welcome = ({ onAsk }) =>
  html`<${Empty} title="Ask the model something, or start with one of these.">
    <div class="row wrap">${EXAMPLES.map((text) => html`<button key=${text} onClick=${() => onAsk(text)}>${text}</button>`)}</div>
  <//>`;
