// Chats from files: those that this page, ChatGPT, llama.cpp and Open WebUI save as JSON, and lists of messages.

import { apiPath, post } from "./api.js";
import { titleOf } from "./chats.js";

const MOST_BYTES = 50 * 1024 ** 2;
const MOST_CHATS = 500;
const MOST_MESSAGES = 2000;
const ITEMS_AT_ONCE = 20;
const TYPES = { user: "input_text", system: "input_text", developer: "input_text", assistant: "output_text" };

/** One message of any of the formats as an item of the API, null where it has nothing to show. Of its parts, texts and pictures
 * that are in the file are kept. */
function itemOf({ role, content }) {
  if (!TYPES[role]) return null;
  const parts = (Array.isArray(content) ? content : [content]).map((part) => partOf(part, TYPES[role])).filter(Boolean);
  return parts.length ? { type: "message", role, content: parts } : null;
}

function partOf(part, type) {
  const text = typeof part === "string" ? part : part?.text;
  if (typeof text === "string") return text.trim() ? { type, text } : null;
  const url = part?.image_url?.url || part?.image_url;
  return type === "input_text" && typeof url === "string" && url.startsWith("data:image/") ? { type: "input_image", image_url: url, detail: "auto" } : null;
}

/** The messages from the root of a tree to `last`; `nodes` have ids of their parents. */
function pathOf(nodes, last) {
  const path = [];
  const seen = new Set();
  for (let node = nodes.get(last); node && !seen.has(node.id); node = nodes.get(node.parent)) {
    seen.add(node.id);
    path.unshift(node);
  }
  return path;
}

const byId = (nodes) => new Map(nodes.filter((node) => node?.id !== undefined).map((node) => [node.id, node]));

/** A chat of this page: each response follows another, and has its own input. */
function readOwn({ title, turns, last_response_id: last }) {
  const nodes = byId(turns.map(({ response, input }) => ({ id: response?.id, parent: response?.previous_response_id, items: [...(input || []), ...(response?.output || [])] })));
  if (!nodes.has(last)) return { title, messages: turns.flatMap(({ response, input }) => [...(input || []), ...(response?.output || [])]) };
  const path = pathOf(nodes, last);
  return { title, messages: path.flatMap(({ items }) => items) };
}

/** A chat of ChatGPT: a tree of nodes with messages whose parts are texts. */
function readMapping({ title, mapping, current_node: last }) {
  const nodes = byId(Object.values(mapping));
  const end = nodes.has(last) ? last : [...nodes.keys()].at(-1);
  return { title, messages: pathOf(nodes, end).map(({ message }) => ({ role: message?.author?.role, content: message?.content?.parts })) };
}

/** A chat of llama.cpp: messages that name their parents, of which `currNode` is the last. */
function readConv({ conv, messages }) {
  const nodes = byId(messages);
  const isTree = nodes.has(conv.currNode);
  return { title: conv.name, messages: isTree ? pathOf(nodes, conv.currNode) : messages };
}

function readOne(value) {
  if (Array.isArray(value?.turns)) return readOwn(value);
  if (value?.mapping && typeof value.mapping === "object") return readMapping(value);
  if (value?.conv && Array.isArray(value.messages)) return readConv(value);
  if (Array.isArray(value?.chat?.messages)) return { title: value.title || value.chat.title, messages: value.chat.messages };
  return Array.isArray(value?.messages) ? { title: value.title, messages: value.messages } : null;
}

/** Return the chats {title, items} of what a file holds. Throws an Error where it holds none. */
export function chatsIn(value) {
  const isMessages = Array.isArray(value) && value.length > 0 && value.every((each) => typeof each?.role === "string");
  const found = isMessages ? [{ messages: value }] : (Array.isArray(value) ? value : [value]).map(readOne);
  const chats = found.filter(Boolean).map(({ title, messages }) => {
    const items = messages.map((message) => message && itemOf(message)).filter(Boolean);
    const first = items.find(({ role }) => role === "user") || items[0];
    return { title: titleOf(title || first?.content.map(({ text }) => text || "").join(" ") || ""), items: items.slice(-MOST_MESSAGES) };
  });
  const whole = chats.filter(({ items }) => items.length);
  if (!whole.length) throw new Error("No chat was found in this file. It takes the JSON that this page, ChatGPT, llama.cpp or Open WebUI saves.");
  if (whole.length > MOST_CHATS) throw new Error(`The file has ${whole.length} chats: ${MOST_CHATS} are taken at a time.`);
  return whole;
}

/** Store the chats of a file as conversations; `onProgress(done, all)` is called after each. Throws ApiError, and an Error for
 * a file without chats. Returns the conversations, in the order of the file. */
export async function importChats(file, onProgress) {
  if (file.size > MOST_BYTES) throw new Error("The file is larger than 50 MiB: split it first.");
  let value;
  try {
    value = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is no JSON.`);
  }
  const chats = chatsIn(value);
  const made = [];
  for (const { title, items } of chats) {
    made.push(await store(title, items));
    onProgress(made.length, chats.length);
  }
  return made;
}

async function store(title, items) {
  const metadata = { title, updated_at: String(Math.floor(Date.now() / 1000)), imported: "true" };
  const conversation = await post("conversations", { items: items.slice(0, ITEMS_AT_ONCE), metadata });
  for (let start = ITEMS_AT_ONCE; start < items.length; start += ITEMS_AT_ONCE)
    await post(apiPath`conversations/${conversation.id}/items`, { items: items.slice(start, start + ITEMS_AT_ONCE) });
  return conversation;
}
