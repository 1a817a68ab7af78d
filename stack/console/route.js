// The URL is the state: `#/view/id/tab?name=value`. Reload, back and a shared link give the same view.

import { useEffect, useState } from "./vendor/preact.js";

export function parseHash(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view = "", id = "", tab = ""] = path.split("/").map(decodeURIComponent);
  return { view: view || "playground", isDefault: !view, id, tab, params: Object.fromEntries(new URLSearchParams(query)) };
}

/** Return the hash of a view; empty params are left out. */
export function hashOf({ view, id, tab, params = {} }) {
  const path = [view, id, tab].filter(Boolean).map(encodeURIComponent).join("/");
  const used = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(used).toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}

/** Change params of the current view without a new entry in the history. */
export function setParams(params) {
  const route = parseHash();
  history.replaceState(null, "", hashOf({ ...route, params: { ...route.params, ...params } }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [route, setRoute] = useState(parseHash());
  useEffect(() => {
    const changed = () => setRoute(parseHash());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
