// The tools of an agent: which can be switched on, and how the list of an agent changes with a switch.

const CONNECTOR = "connector:";

/** [type, name, what it does] of the tools that a switch brings. */
export const SWITCHED = [
  ["web_search", "Web search", "looks for pages and reads them"],
  ["tool_search", "Tool search", "finds functions with defer_loading when they are needed"],
];

export const toolName = (tool) => tool.name || tool.server_label || tool.type.replace(/_/g, " ");

const isConnector = (tool) => tool.type === "mcp" && (tool.transport?.server_url || "").startsWith(CONNECTOR);
const isOn = (tool) => tool.type !== "web_search" || tool.mode !== "disabled";
const keyOf = (tool) => (isConnector(tool) ? `${CONNECTOR}${tool.server_label}` : tool.type);

/** Cut the tools of an agent into {switched: the keys that are on, asks: the servers whose calls wait, functions, others}. */
export function cutTools(tools) {
  const switched = tools.filter((tool) => isOn(tool) && (isConnector(tool) || SWITCHED.some(([type]) => type === tool.type)));
  const functions = tools.filter(({ type }) => type === "function").map(showFunction);
  return {
    switched: switched.map(keyOf),
    asks: switched.filter((tool) => tool.require_approval === "always").map(keyOf),
    functions: functions.length ? JSON.stringify(functions, null, 2) : "",
    others: tools.filter((tool) => tool.type !== "function" && !switched.includes(tool)),
  };
}

/** The tools of a form, each with all that it had. Throws an Error where the functions are no JSON. */
export function joinTools({ switched, asks, functions, others }, before) {
  const made = switched.map((key) => {
    const old = before.find((tool) => isOn(tool) && keyOf(tool) === key);
    if (!key.startsWith(CONNECTOR)) return old || { type: key };
    const label = key.slice(CONNECTOR.length);
    const { require_approval: _, ...server } = old || { type: "mcp", server_label: label, transport: { type: "http", server_url: key } };
    return asks.includes(key) ? { ...server, require_approval: "always" } : server;
  });
  const joined = [...made, ...parseFunctions(functions).map((each) => before.find((tool) => tool.type === "function" && same(showFunction(tool), showFunction(each))) || each), ...others];
  const placeOf = (tool) => before.findIndex((each) => each === tool || (each.type === tool.type && toolName(each) === toolName(tool)));
  const [old, added] = [joined.filter((tool) => placeOf(tool) >= 0), joined.filter((tool) => placeOf(tool) < 0)];
  return [...old.sort((one, other) => placeOf(one) - placeOf(other)), ...added];
}

/** A function as the form has it: what it is called first, and without what is so by default. */
function showFunction({ type: _, name, description, defer_loading: isDeferred, ...rest }) {
  return { name, description, ...rest, ...(isDeferred && { defer_loading: true }) };
}

const sorted = (_, value) => (value && typeof value === "object" && !Array.isArray(value) ? Object.fromEntries(Object.entries(value).sort(([one], [other]) => (one < other ? -1 : 1))) : value);
/** True for two values of JSON that say the same. */
export const same = (one, other) => JSON.stringify(one, sorted) === JSON.stringify(other, sorted);

function parseFunctions(text) {
  if (!text.trim()) return [];
  let parsed;
  try {
    parsed = JSON.parse(text);
  } catch (error) {
    throw new Error(`Functions: ${error.message}`);
  }
  return [parsed].flat().map((each) => ({ type: "function", ...each }));
}

export const connectorKey = (label) => `${CONNECTOR}${label}`;
/** Servers of MCP by URL may have a secret, which the API does not show: whoever sends their tools sends it again. */
export const hidesSecret = (tool) => tool.type === "mcp" && !isConnector(tool);
