// The tools of this server: which there are, why others are not, and what a request declares for each.

import { get, getAll } from "./api.js";
import { useEffect, useState } from "./vendor/preact.js";

/** [type, name, what it does] of the tools that a server may run itself. */
export const HOSTED_TOOLS = [
  ["web_search", "Web search", "looks for pages and reads them"],
  ["code_interpreter", "Python", "runs programs in a sandbox"],
  ["shell", "Shell", "runs commands in a container"],
  ["file_search", "File search", "searches in vector stores"],
  ["image_generation", "Pictures", "makes pictures"],
];

/** What the server says of its tools: {byType: Map, servers: labels of MCP servers, stores, isKnown,
 * mayInstall: models}. One that does not say it is
 * taken to have all. */
export function useTools() {
  const [tools, setTools] = useState({ byType: new Map(), servers: [], stores: [], isKnown: false, mayInstall: false });
  useEffect(() => {
    let isWanted = true;
    (async () => {
      const overview = await get("stack/overview").catch(() => null);
      if (!overview?.tools || !isWanted) return;
      const byType = new Map(overview.tools.map((tool) => [tool.type, tool]));
      const known = { byType, servers: byType.get("mcp")?.servers || [], stores: [], isKnown: true, mayInstall: Boolean(overview.may_install_models) };
      setTools(known);
      if (byType.get("file_search")?.reason) return;
      const stores = await getAll("vector_stores").catch(() => []);
      if (isWanted) setTools({ ...known, stores });
    })();
    return () => (isWanted = false);
  }, []);
  return tools;
}

/** The reason why the server lacks a tool; empty where it has it. */
export const reasonOf = (tools, type) => tools.byType.get(type)?.reason || "";

/** The declaration of a hosted tool in a request. */
export function declarationOf(type, settings) {
  if (type === "code_interpreter") return { type, container: { type: "auto" } };
  if (type === "shell") return { type, environment: { type: "container_auto" } };
  if (type === "file_search") return { type, vector_store_ids: settings.vectorStoreIds.split(/[\s,]+/).filter(Boolean) };
  return { type };
}
