// Models that this server fetches to its machine: GET /v1/stack/models, and the one fetch at a time.

import { call, get, post } from "./api.js";
import { useEffect, useState } from "./vendor/preact.js";

const EVERY_MS = 1000;
/** Event of the window: the server serves other models than before. */
export const MODELS_CHANGED = "stack:models";

const isActive = (pull) => ["queued", "in_progress"].includes(pull?.status);

/** The models to fetch: {library, pull, error, begin(name), cancel()}; `library` is null until it is known. `wanted` says
 * that the server fetches models for this key. */
export function useLocalModels(wanted) {
  const [library, setLibrary] = useState(null);
  const [pull, setPull] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (wanted) get("stack/models").then((found) => (setLibrary(found), setPull(found.pull)), setError);
  }, [wanted]);
  const active = isActive(pull);
  useEffect(() => {
    if (!active) return undefined;
    const timer = setInterval(async () => {
      const now = await get("stack/models/pull").catch(() => null); // a server that is away comes back
      if (!now) return;
      setPull(now);
      if (now.status === "completed") dispatchEvent(new Event(MODELS_CHANGED));
    }, EVERY_MS);
    return () => clearInterval(timer);
  }, [active]);
  const attempt = (work) =>
    work.then(
      (next) => (setError(null), setPull(next)),
      (failure) => setError(failure),
    );
  return { library, pull, error, isActive: active, begin: (name) => attempt(post("stack/models/pull", { name })), cancel: () => attempt(call("DELETE", "stack/models/pull")) };
}
