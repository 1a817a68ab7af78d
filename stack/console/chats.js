// Chats: conversations of the server whose metadata have a title and the last response in sight. The responses are the turns;
// each names its chat in its own metadata, so that a search of responses finds the chat. Until it goes on, an imported chat has
// no response: its turns are the items of the conversation.

import { apiPath, get, post, remove } from "./api.js";
import { inTurns, loadBranches } from "./chain.js";

const MOST_TITLE_CHARS = 80;
/** Characters of one value of metadata; the ids of the first turns of a chat share one. */
const MOST_VALUE_CHARS = 512;
const PAGE = 50;
const DAY_S = 86_400;
const LAST = "last_response_id";
/** The key of metadata that all chats have. */
const EVERY = "updated_at";
/** The keys of metadata that chats have. */
export const CHAT_KEYS = new Set(["title", "roots", "pinned", "imported", LAST, EVERY]);

/** The first words of a question as a title, cut at a space. */
export function titleOf(text) {
  const line = text.replace(/[#*`>_\s]+/g, " ").trim();
  if (line.length <= MOST_TITLE_CHARS) return line || "New chat";
  const cut = line.slice(0, MOST_TITLE_CHARS);
  return `${cut.slice(0, cut.lastIndexOf(" ") > 40 ? cut.lastIndexOf(" ") : MOST_TITLE_CHARS)}…`;
}

/** A conversation as a chat: {id, title, last, roots, isPinned, at}, the last in seconds. */
export function chatOf({ id, created_at, metadata = {} }) {
  const roots = (metadata.roots || "").split(" ").filter(Boolean);
  return { id, title: metadata.title || "Untitled", last: metadata[LAST], roots, isPinned: metadata.pinned === "true", at: Number(metadata.updated_at) || created_at };
}

const startOfDay = (seconds) => new Date(seconds * 1000).setHours(0, 0, 0, 0) / 1000;

/** Group chats by the day of their last turn, newest first: [{name, chats}]; pinned ones come first. */
export function groupByDay(chats, now = Date.now() / 1000) {
  const today = startOfDay(now);
  const nameOf = ({ isPinned, at }) => {
    if (isPinned) return "Pinned";
    if (at >= today) return "Today";
    if (at >= today - DAY_S) return "Yesterday";
    const date = new Date(at * 1000);
    return at >= today - 6 * DAY_S ? date.toLocaleDateString("en", { weekday: "long" }) : date.toLocaleDateString("en", { month: "long", year: "numeric" });
  };
  const groups = new Map();
  const sorted = [...chats].sort((one, other) => other.isPinned - one.isPinned || other.at - one.at);
  for (const chat of sorted) groups.set(nameOf(chat), [...(groups.get(nameOf(chat)) || []), chat]);
  return [...groups].map(([name, members]) => ({ name, chats: members }));
}

const isChat = ({ metadata }) => Boolean(metadata?.[LAST] || metadata?.imported);

/** The params of the Playground that open a chat. */
export const paramsOf = ({ id, last }) => (last ? { from: last } : { chat: id });

/** Return a page of chats {chats, after}; the first one brings the pinned ones of all pages. */
export async function listChats(after) {
  const pages = [get("conversations", { search: EVERY, limit: PAGE, after })];
  if (!after) pages.push(get("conversations", { search: "pinned", limit: PAGE }));
  const [page, pinned] = await Promise.all(pages);
  const rows = [...page.data, ...(pinned ? pinned.data : [])].filter(isChat);
  const chats = [...new Map(rows.map((row) => [row.id, chatOf(row)])).values()];
  return { chats, after: page.has_more ? page.last_id : null };
}

/** Search in titles, questions and answers; return chats, those that were found by a turn with its `words` and `last` of it. */
export async function searchChats(text, signal) {
  const [titles, turns] = await Promise.all([get("conversations", { search: text, limit: PAGE }, signal), get("responses", { search: text, limit: PAGE }, signal)]);
  const hits = new Map(titles.data.filter(isChat).map((row) => [row.id, chatOf(row)]));
  const found = new Map();
  for (const turn of turns.data) if (turn.metadata?.chat && !hits.has(turn.metadata.chat) && !found.has(turn.metadata.chat)) found.set(turn.metadata.chat, turn);
  await inTurns([...found], async ([id, turn]) => {
    const conversation = await get(apiPath`conversations/${id}`, {}, signal).catch(() => null);
    if (conversation && isChat(conversation)) hits.set(id, { ...chatOf(conversation), last: turn.id, words: wordsAround(text, turn.question, turn.preview) });
  });
  return [...hits.values()];
}

/** The part of a text in which words were found. */
function wordsAround(text, ...among) {
  const found = among.find((each) => each?.toLowerCase().includes(text.toLowerCase())) || among.at(-1) || "";
  const start = Math.max(0, found.toLowerCase().indexOf(text.toLowerCase()) - 30);
  return `${start ? "…" : ""}${found.slice(start, start + 110)}`;
}

/** The record of one chat, made with its first turn. Changes are written one after the other; the last one wins. */
export class ChatRecord {
  constructor(onChange) {
    this.onChange = onChange;
    this.chat = null;
    this.metadata = null;
    this.making = null;
    this.writes = Promise.resolve();
  }

  /** Take the chat that a stored response names, if it still exists. */
  async load(id) {
    const conversation = id ? await get(apiPath`conversations/${id}`).catch(() => null) : null;
    this.take(conversation);
  }

  take(conversation) {
    this.metadata = conversation?.metadata || null;
    this.chat = conversation && isChat(conversation) ? chatOf(conversation) : null;
    if (this.chat) this.onChange(this.chat);
  }

  /** Return the id of the chat, which is made where there is none: {title, root: the first response, if there is one}. Without
   * the right to make one, there is no chat, and the answer is not kept in the list. */
  async ensure({ title, root }) {
    if (this.chat) return this.chat.id;
    this.making ||= post("conversations", { metadata: { title, updated_at: now(), ...(root && { roots: root, [LAST]: root }) } })
      .then((made) => {
        this.metadata = made.metadata;
        this.chat = chatOf(made);
        return made.id;
      })
      .catch(() => undefined)
      .finally(() => (this.making = null));
    return this.making;
  }

  /** Write down the last response in sight; one without a parent is a further beginning of the chat. */
  note(id, isRoot) {
    if (!this.chat) return;
    this.change((metadata) => {
      const roots = (metadata.roots || "").split(" ").filter((each) => each && each !== id);
      if (isRoot) roots.push(id);
      while (roots.join(" ").length > MOST_VALUE_CHARS) roots.shift();
      return { ...metadata, [LAST]: id, updated_at: now(), roots: roots.join(" ") };
    });
  }

  change(edit) {
    const { id } = this.chat;
    this.metadata = edit(this.metadata);
    const body = { metadata: this.metadata };
    this.writes = this.writes.then(() => post(apiPath`conversations/${id}`, body)).then((changed) => this.take(changed), () => {});
    return this.writes;
  }
}

const now = () => String(Math.floor(Date.now() / 1000));

/** Change the metadata of a chat as it is on the server now; return the chat. Throws ApiError. */
export async function changeChat(id, changes) {
  const { metadata } = await get(apiPath`conversations/${id}`);
  const all = Object.entries({ ...metadata, ...changes }).filter(([, value]) => value !== null);
  return chatOf(await post(apiPath`conversations/${id}`, { metadata: Object.fromEntries(all) }));
}

/** Return the ids of all responses of a chat, whose branches may begin at several roots. */
export async function responsesOf(chat) {
  const ids = new Set();
  for (const root of new Set([...chat.roots, chat.last].filter(Boolean))) {
    if (ids.has(root)) continue;
    const branches = await loadBranches(root).catch((error) => {
      if (error.status === 404) return null;
      throw error;
    });
    for (const row of branches?.byId.values() || []) if (!row.deleted) ids.add(row.id);
  }
  return [...ids];
}

/** Delete a chat and all of its responses. Throws ApiError. */
export async function deleteChat(chat) {
  await inTurns(await responsesOf(chat), (id) =>
    remove(apiPath`responses/${id}`).catch((error) => {
      if (error.status !== 404) throw error;
    }),
  );
  await remove(apiPath`conversations/${chat.id}`);
}

const draftKey = (name) => `stack.draft.${name || "new"}`;

/** The text that was written and not sent, kept in this tab: of a response that it would follow, or of a new chat. */
export const readDraft = (name) => sessionStorage.getItem(draftKey(name)) || "";
export function saveDraft(name, text) {
  if (text) sessionStorage.setItem(draftKey(name), text);
  else sessionStorage.removeItem(draftKey(name));
}
