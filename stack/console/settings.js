// What a request asks for: settings of the Playground, and the body that they make.

import { problemOf } from "./schema/metaschema.js";
import { declarationOf } from "./tools.js";

export const DEFAULTS = {
  model: "",
  instructions: "",
  effort: "",
  temperature: "",
  topP: "",
  maxOutputTokens: "",
  tools: [],
  servers: [],
  vectorStoreIds: "",
  functions: "",
  mcpServers: "",
  schema: "",
  background: true,
  store: true,
};

const STORAGE = "stack.playground";

export function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(STORAGE) || "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export const saveSettings = (settings) => localStorage.setItem(STORAGE, JSON.stringify(settings));

/** Instructions by the names under which they were kept: {name: text}. */
export const readPresets = () => readPreference("presets", {});
export function savePreset(name, text) {
  const presets = { ...readPresets(), [name]: text };
  if (!text) delete presets[name];
  savePreference("presets", presets);
}

/** How the page looks and sends in this browser. */
export function readPreference(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`stack.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
export const savePreference = (name, value) => localStorage.setItem(`stack.${name}`, JSON.stringify(value));

/** The boxes of JSON by their labels; the panel shows these, and errors name them. */
export const BOXES = { functions: "Functions that you answer", mcpServers: "MCP servers", schema: "Answer as JSON of this schema" };

/** Return the JSON of a box, undefined where it is empty. Throws an Error that names the box and its first problem. */
function parse(settings, field) {
  const problem = problemOf(field, settings[field]);
  if (problem) throw new Error(`${BOXES[field]}: ${problem}`);
  return settings[field].trim() ? JSON.parse(settings[field]) : undefined;
}

const number = (text) => (text === "" ? undefined : Number(text));

function toolsOf(settings) {
  const tools = settings.tools.map((type) => declarationOf(type, settings));
  const functions = [parse(settings, "functions") || []].flat().map((each) => ({ type: "function", ...each }));
  const servers = [parse(settings, "mcpServers") || []].flat().map((each) => ({ type: "mcp", ...each }));
  const known = settings.servers.map((label) => ({ type: "mcp", server_label: label, require_approval: "always" }));
  return [...tools, ...functions, ...known, ...servers];
}

/** A name that the API takes, from the schema's title. */
const nameOf = (schema) => (schema.title || "").replace(/[^A-Za-z0-9_-]+/g, "_").slice(0, 64) || "answer";

/** Return the body of POST /v1/responses for `input`, following `previous` (a response) where there is one. */
export function bodyOf(settings, input, previous) {
  const tools = toolsOf(settings);
  const schema = parse(settings, "schema");
  const body = {
    model: settings.model,
    input,
    stream: true,
    store: settings.store,
    instructions: settings.instructions || undefined,
    reasoning: settings.effort ? { effort: settings.effort } : undefined,
    temperature: number(settings.temperature),
    top_p: number(settings.topP),
    max_output_tokens: number(settings.maxOutputTokens),
    tools: tools.length ? tools : undefined,
    include: includeOf(settings),
    text: schema && { format: { type: "json_schema", name: nameOf(schema), schema, strict: true } },
    background: (settings.background && settings.store) || undefined,
    previous_response_id: previous?.id,
  };
  return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== undefined));
}

function includeOf(settings) {
  const include = [];
  if (settings.tools.includes("web_search")) include.push("web_search_call.action.sources");
  if (settings.tools.includes("file_search")) include.push("file_search_call.results");
  if (settings.tools.includes("code_interpreter")) include.push("code_interpreter_call.outputs");
  return include.length ? include : undefined;
}
