// Icons of 16 by 16, drawn with strokes of the text's colour.

import { html } from "../vendor/preact.js";

const PATHS = {
  playground: "M3 3h10v7H7l-3 3v-3H3z",
  responses: "M3 4h10M3 8h10M3 12h6",
  runs: "M8 3a5 5 0 1 0 5 5M8 5v3l2 2M11 2h3v3",
  conversations: "M2 3h8v6H5l-2 2V9H2zM7 11h4l2 2v-2h1V6h-2",
  files: "M4 2h5l3 3v9H4zM9 2v3h3",
  traces: "M2 4h6M5 8h7M9 12h5",
  figures: "M2 13l3-5 3 2 5-7M2 14h12",
  usage: "M3 13V8h2v5zM7 13V3h2v10zM11 13V6h2v7z",
  team: "M6 7.5a2.5 2.5 0 1 0 0-5 2.5 2.5 0 0 0 0 5M2 13c0-2.5 1.8-4 4-4s4 1.5 4 4M10.5 3a2.3 2.3 0 0 1 0 4.4M12 9.3c1.3.6 2 1.9 2 3.7",
  agents: "M8 5V2.5M3.5 5h9v7h-9zM6 8h.01M10 8h.01M6.5 10.3h3M1.5 8v1.5M14.5 8v1.5",
  key: "M9 7a3 3 0 1 0-2.2 2.9L8 11h2v2h3v-2.5L9 7zM5.5 6.5h.01",
  theme: "M8 2a6 6 0 1 0 0 12zM8 2a6 6 0 0 1 0 12",
  close: "M4 4l8 8M12 4l-8 8",
  copy: "M5 5h8v8H5zM3 11V3h8",
  reasoning: "M6 13h4M6.5 11a4 4 0 1 1 3 0",
  message: "M3 3h10v7H7l-3 3v-3H3z",
  tool: "M10 3a3 3 0 0 0-3 4L3 11l2 2 4-4a3 3 0 0 0 4-4l-2 2-2-2z",
  attach: "M11 5l-5 5a1.5 1.5 0 0 0 2 2l5-5a3 3 0 0 0-4-4L4 8a4 4 0 0 0 6 6",
  microphone: "M8 2a2 2 0 0 0-2 2v4a2 2 0 0 0 4 0V4a2 2 0 0 0-2-2M3.5 8a4.5 4.5 0 0 0 9 0M8 12.5V15",
  speaker: "M2 6h2.5L8 3v10L4.5 10H2zM10.5 6a3 3 0 0 1 0 4M12.5 4a6 6 0 0 1 0 8",
  upload: "M3 13h10M8 10V3M5 6l3-3 3 3",
  plus: "M8 3v10M3 8h10",
  compare: "M2 3h5v10H2zM9 3h5v10H9z",
  left: "M10 3L5 8l5 5",
  right: "M6 3l5 5-5 5",
  more: "M3 8h.01M8 8h.01M13 8h.01",
  pin: "M6 2h4v4l2 3H4l2-3zM8 9v5",
  settings: "M2 5h7M12 5h2M9 3v4M2 11h2M7 11h7M4 9v4",
};

export const Icon = ({ name }) =>
  html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path d=${PATHS[name] || PATHS.tool} /></svg>`;
