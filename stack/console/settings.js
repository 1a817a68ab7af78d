// What a request asks for: settings of the Playground, and the body that they make.

import { problemOf } from "./schema/metaschema.js";

export const DEFAULTS = {
  model: "",
  instructions: "",
  effort: "",
  temperature: "",
  topP: "",
  maxOutputTokens: "",
  tools: [],
  vectorStoreIds: "",
  functions: "",
  mcpServers: "",
  schema: "",
  background: true,
  store: true,
};

export const HOSTED_TOOLS = [
  ["web_search", "Web search"],
  ["code_interpreter", "Python"],
  ["file_search", "File search"],
];

const STORAGE = "stack.playground";

export function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(STORAGE) || "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export const saveSettings = (settings) => localStorage.setItem(STORAGE, JSON.stringify(settings));

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
  const tools = settings.tools.map((type) => {
    if (type === "code_interpreter") return { type, container: { type: "auto" } };
    if (type === "file_search") return { type, vector_store_ids: settings.vectorStoreIds.split(/[\s,]+/).filter(Boolean) };
    return { type };
  });
  const functions = [parse(settings, "functions") || []].flat().map((each) => ({ type: "function", ...each }));
  const servers = [parse(settings, "mcpServers") || []].flat().map((each) => ({ type: "mcp", ...each }));
  return [...tools, ...functions, ...servers];
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
