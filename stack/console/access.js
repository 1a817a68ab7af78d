// What the key of this page may do: GET /v1/stack/key. Views that it may not use are not offered.

import { get } from "./api.js";

const PROJECT = ["responses", "files", "read"];

/** Each view by the scopes of which one is needed, or by what else has to be true of the key. */
const NEEDS = {
  playground: (key) => has(key, "responses"),
  responses: (key) => has(key, "responses", "read"),
  runs: (key) => has(key, "responses", "read"),
  conversations: (key) => has(key, "responses", "read"),
  agents: (key) => has(key, "responses", "read"),
  files: (key) => has(key, "files", "read"),
  traces: (key) => has(key, "responses", "read"),
  figures: () => true,
  usage: (key) => Boolean(key.records_usage),
  team: (key) => Boolean(key.manages_accounts),
};

/** The rights that are assumed until the server has answered: those of a project's whole key. */
export const UNKNOWN = { scopes: PROJECT, limits: [] };

const has = (key, ...scopes) => scopes.some((scope) => key.scopes.includes(scope));
export const mayShow = (key, view) => NEEDS[view](key);
export const mayListModels = (key) => has(key, ...PROJECT);

/** Load the rights of the key. Throws ApiError. */
export const loadKey = () => get("stack/key");
