// Calls of the public HTTP API. Every view goes through here; there is no private route.

import { currentKey } from "./session.js";
import { readEvents } from "./sse.js";

const base = new URL("v1/", document.baseURI).href;

/** An error of the API, with everything that helps its reader: message, code, param, status, request id. */
export class ApiError extends Error {
  constructor(status, body, requestId) {
    const error = (body && body.error) || {};
    super(error.message || `The server answered with status ${status}.`);
    this.status = status;
    this.code = error.code || null;
    this.param = error.param || null;
    this.type = error.type || null;
    this.requestId = requestId || null;
  }
}

const SHOWN = ["code_interpreter_call.outputs", "file_search_call.results", "web_search_call.action.sources"];
/** Event of the window: the server has refused the key. */
export const UNAUTHORIZED = "stack:unauthorized";
export const baseUrl = base.replace(/\/$/, "");

/** Return the path of a template: each value is one segment of it, whatever characters an address or a trace brought. No
 * resource is named by dots alone, which would lead to another route; such a name leads to a 404. */
export const apiPath = (texts, ...values) =>
  texts.reduce((path, text, index) => path + (/^\.*$/.test(values[index - 1]) ? "%EF%BF%BD" : encodeURIComponent(values[index - 1])) + text);

async function send(method, path, { body, form, query, signal, headers } = {}) {
  const url = new URL(path.replace(/^\//, ""), base);
  for (const [name, value] of Object.entries(query || {})) {
    if (Array.isArray(value)) value.forEach((each) => url.searchParams.append(`${name}[]`, each));
    else if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  const init = { method, signal, headers: { ...headers }, cache: "no-store" };
  const key = await currentKey();
  if (key) init.headers.authorization = `Bearer ${key}`;
  if (body !== undefined) {
    init.headers["content-type"] = "application/json";
    init.body = JSON.stringify(body);
  } else if (form) {
    init.body = form;
  }
  let response;
  try {
    response = await fetch(url, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { error: { message: "The server cannot be reached. Is it still running?", code: "unreachable" } });
  }
  if (!response.ok) {
    const requestId = response.headers.get("x-request-id");
    if (response.status === 401) dispatchEvent(new Event(UNAUTHORIZED));
    throw new ApiError(response.status, await response.json().catch(() => null), requestId);
  }
  return response;
}

/** Return the JSON answer of a call. Throws ApiError. */
export async function call(method, path, options) {
  const response = await send(method, path, options);
  return (response.headers.get("content-type") || "").includes("json") ? response.json() : response.text();
}

export const get = (path, query, signal) => call("GET", path, { query, signal });
/** Return the rows of all pages of a listing, of 10,000 rows at most. */
export async function getAll(path, query, signal) {
  const rows = [];
  for (let after, turn = 0; turn < 100; turn += 1) {
    const page = await get(path, { limit: 100, ...query, after }, signal);
    rows.push(...page.data);
    if (!page.has_more) break;
    after = page.last_id || page.data.at(-1)?.id;
  }
  return rows;
}
export const post = (path, body) => call("POST", path, { body });
/** Return a stored response with all that its view shows. */
export const getShown = (id, signal) => get(apiPath`responses/${id}`, { include: SHOWN }, signal);
export const cancelResponse = (id) => post(apiPath`responses/${id}/cancel`, {});
export const remove = (path) => call("DELETE", path);

/** Yield the events of a streamed call as {event, size, at}; `at` is the time in ms at which it came. */
export async function* stream(method, path, options) {
  yield* await openStream(method, path, options);
}

/** Return the events of a streamed call once the server has begun to answer it. */
export const openStream = async (method, path, options) => readEvents((await send(method, path, options)).body);

/** The bytes that a path returns: only a request can carry the key, so no link could. */
export const fetchBlob = async (path, options) => (await send("GET", path, options)).blob();
/** Save what a path returns as a file. */
export const download = async (path, name) => saveBlob(await fetchBlob(path), name);

export function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Upload a file and report its progress from 0 to 1; fetch cannot, so this is the one use of XMLHttpRequest. */
export async function upload(path, form, onProgress) {
  const key = await currentKey();
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", new URL(path.replace(/^\//, ""), base));
    if (key) request.setRequestHeader("authorization", `Bearer ${key}`);
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onerror = () => reject(new ApiError(0, { error: { message: "The upload broke off." } }));
    request.onload = () => {
      let body = null;
      try {
        body = JSON.parse(request.responseText);
      } catch {
        body = null;
      }
      if (request.status === 401) dispatchEvent(new Event(UNAUTHORIZED));
      if (request.status < 300) resolve(body);
      else reject(new ApiError(request.status, body, request.getResponseHeader("x-request-id")));
    };
    request.send(form);
  });
}
