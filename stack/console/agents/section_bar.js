// The heading of the three lists: agents, sessions, schedules.

import { hashOf } from "../route.js";
import { html } from "../vendor/preact.js";

const SECTIONS = { agents: "", sessions: "sessions", schedules: "schedules" };

export const SectionBar = ({ current, children }) =>
  html`<header class="bar">
    <h1>Agents</h1>
    <nav class="modes" aria-label="Agents">
      ${Object.entries(SECTIONS).map(
        ([name, id]) => html`<a key=${name} href=${hashOf({ view: "agents", id })} class=${name === current ? "on" : ""} aria-current=${name === current ? "page" : undefined}>${name}</a>`,
      )}
    </nav>
    <span class="grow"></span>${children}
  </header>`;

/** The heading of one object: a way back to its list, its name, its state, what can be done with it. */
export const ObjectBar = ({ section, title, children }) =>
  html`<header class="bar">
    <a class="back" href=${hashOf({ view: "agents", id: SECTIONS[section] })}>${section[0].toUpperCase() + section.slice(1)}</a>
    <h1 class="clip">${title}</h1>${children}
  </header>`;
