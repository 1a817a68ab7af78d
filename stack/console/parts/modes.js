// The two halves of the Playground.

import { hashOf } from "../route.js";
import { html } from "../vendor/preact.js";

const MODES = { responses: "", decisions: "decisions" };

export const Modes = ({ current }) =>
  html`<nav class="modes" aria-label="Playground">
    ${Object.entries(MODES).map(
      ([name, id]) => html`<a key=${name} href=${hashOf({ view: "playground", id })} class=${name === current ? "on" : ""} aria-current=${name === current ? "page" : undefined}>${name}</a>`,
    )}
  </nav>`;
