// The fields of an agent as a form has them, and the body of the request that makes or changes it.

import { pairsOf, rowsOf } from "./metadata_fields.js";
import { cutTools, joinTools, same } from "./tools.js";

const KNOWN = new Set(["id", "object", "name", "model", "instructions", "tools", "reasoning", "metadata", "created_at", "updated_at"]);

export const SUMMARIES = ["auto", "concise", "detailed"];
export const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/** The form of an agent; without one, of a new agent. */
export const fieldsOf = (agent) => ({
  name: agent?.name || "",
  model: agent?.model || "",
  instructions: agent?.instructions || "",
  effort: agent?.reasoning?.effort || "",
  summary: agent?.reasoning?.summary || "",
  tools: cutTools(agent?.tools || []),
  metadata: rowsOf(agent?.metadata),
});

/** What an agent has besides the form; a change leaves it as it is. */
export const restOf = (agent) => Object.fromEntries(Object.entries(agent).filter(([name, value]) => !KNOWN.has(name) && value !== null));

/** The fields of a form that differ from those of the agent: what is not sent stays. Throws an Error that names the field. */
export function changesOf(fields, agent) {
  const before = agent || { name: null, instructions: null, tools: [], reasoning: {}, metadata: {} };
  const body = {
    name: fields.name.trim() || null,
    model: fields.model.trim(),
    instructions: fields.instructions || null,
    tools: joinTools(fields.tools, before.tools),
    reasoning: { ...before.reasoning, effort: fields.effort || null, summary: fields.summary || null },
    metadata: pairsOf(fields.metadata),
  };
  const wasSame = { ...before, reasoning: { ...before.reasoning, effort: before.reasoning?.effort || null, summary: before.reasoning?.summary || null } };
  return Object.fromEntries(Object.entries(body).filter(([name, value]) => !same(value, wasSame[name])));
}
