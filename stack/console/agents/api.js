// Calls of the Agents API, a beta that each request names.

import { call, fetchBlob, openStream } from "../api.js";

const headers = { "OpenAI-Beta": "agents=v1" };

export const read = (path, query, signal) => call("GET", path, { query, signal, headers });
/** Send a body; what was sent under a `key` before has no further effect. */
export const write = (path, body, key) => call("POST", path, { body, headers: key ? { ...headers, "Idempotency-Key": key } : headers });
export const erase = (path) => call("DELETE", path, { headers });
/** Return the events of a stream, once the server has begun to send it. */
export const follow = (path, query, signal) => openStream("GET", path, { query, signal, headers });
export const readBlob = (path) => fetchBlob(path, { headers });

export const userMessage = (text) => ({ role: "user", content: [{ type: "input_text", text }] });
