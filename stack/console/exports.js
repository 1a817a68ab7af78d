// Chats as files: Markdown of the path in sight, JSON of every branch.

import { apiPath, getAll, getShown, saveBlob } from "./api.js";
import { inTurns, loadBranches } from "./chain.js";
import { responsesOf } from "./chats.js";
import { time } from "./format.js";

const textOf = (content) => (typeof content === "string" ? content : (content || []).map(partText).filter(Boolean).join("\n\n"));

function partText(part) {
  if (part.text !== undefined) return part.text;
  if (part.refusal !== undefined) return part.refusal;
  return `[${(part.type || "part").replace("input_", "")}${part.filename ? `: ${part.filename}` : ""}]`;
}

const fenced = (text, language = "") => {
  const longest = Math.max(2, ...(text.match(/`+/g) || []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
};

/** One item as Markdown; tools are folded, reasoning is left out. */
function itemToMarkdown(item, model) {
  if (item.type === "message" || (!item.type && item.role)) return `## ${item.role === "assistant" ? model : item.role === "user" ? "You" : item.role}\n\n${textOf(item.content)}`;
  if (item.type === "reasoning") return "";
  return `<details><summary>${item.name || item.type.replace(/_/g, " ")}</summary>\n\n${fenced(JSON.stringify(item, null, 2), "json")}\n\n</details>`;
}

/** The Markdown of a chat: `turns` are {response, input}, oldest first. */
export function toMarkdown(title, turns) {
  const parts = turns.flatMap(({ response, input }) => [...input, ...response.output].map((item) => itemToMarkdown(item, response.model)));
  const made = turns.length ? `*${time(turns[0].response.created_at)}, ${turns.at(-1).response.model}*` : "";
  return [`# ${title}`, made, ...parts].filter(Boolean).join("\n\n") + "\n";
}

const read = async (id) => ({ response: await getShown(id), input: await getAll(apiPath`responses/${id}/input_items`, { order: "asc" }) });

/** The turns of an imported chat that has not gone on: one, whose input is all of its items. */
const readImported = async ({ id, at }) => [{ response: { created_at: at, model: "Assistant", output: [] }, input: await getAll(apiPath`conversations/${id}/items`, { order: "asc" }) }];

const fileName = (title, ending) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat"}.${ending}`;

/** Save the branch in sight as Markdown. Throws ApiError. */
export async function exportMarkdown(chat) {
  const turns = chat.last ? await readPath(chat.last) : await readImported(chat);
  saveBlob(new Blob([toMarkdown(chat.title, turns)], { type: "text/markdown" }), fileName(chat.title, "md"));
}

async function readPath(last) {
  const branches = await loadBranches(last);
  return inTurns(branches.pathTo(last).filter((id) => !branches.byId.get(id).deleted), read);
}

/** Save all branches as JSON: the objects of the API, each response with its own input. Throws ApiError. */
export async function exportJson(chat) {
  const turns = chat.last ? await inTurns(await responsesOf(chat), read) : await readImported(chat);
  const text = JSON.stringify({ title: chat.title, last_response_id: chat.last, turns }, null, 2);
  saveBlob(new Blob([text], { type: "application/json" }), fileName(chat.title, "json"));
}
