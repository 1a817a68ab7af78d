// What the projects, keys and models have used.

import { apiPath, get, getAll } from "../../api.js";
import { Choices, MEASURE_CHOICE, RANGE_CHOICE, UsageReport, rangeOf, useBuckets } from "../../parts/usage_report.js";
import { html, useEffect, useState } from "../../vendor/preact.js";

/** By name: [fields that results are grouped by, id of a result's group, heading]. */
const GROUPINGS = {
  model: [["model"], (row) => row.model, "Model"],
  project: [["project_id"], (row) => row.project_id, "Project"],
  key: [["project_id", "api_key_id"], (row) => row.api_key_id, "Key"],
};

export function TeamUsage({ params, projects }) {
  const by = GROUPINGS[params.by] ? params.by : "model";
  const [fields, groupOf, head] = GROUPINGS[by];
  const range = rangeOf(params);
  const only = params.project ? [params.project] : undefined;
  const [buckets, error, reload] = useBuckets(
    (query) => get("organization/usage/completions", { ...query, group_by: fields, project_ids: only }),
    range,
    [by, params.project],
  );
  const keys = useKeyNames(by === "key" ? buckets : null);
  const names = { project: (id) => projects.find((each) => each.id === id)?.name || id, key: (id) => keys[id] || id || "without a key", model: (id) => id || "unknown" };
  const choices = [RANGE_CHOICE, ["by", "Group by", [["model", "model"], ["project", "project"], ["key", "key"]]], MEASURE_CHOICE];
  return html`<${Choices} params=${params} choices=${choices} />
    <${UsageReport} buckets=${buckets} error=${error} onRetry=${reload} params=${params} groupOf=${groupOf} nameOf=${names[by]} head=${head} />`;
}

/** Keys of one name are common ("Secret Key" is the first of every account), so the account's name goes before it. */
function nameOfKey({ name, owner }) {
  const account = owner?.service_account?.name;
  return account && account !== name ? `${account} · ${name}` : name;
}

/** The names of the keys that buckets know by id; revoked ones have none. */
function useKeyNames(buckets) {
  const [names, setNames] = useState({});
  useEffect(() => {
    const projects = new Set((buckets || []).flatMap(({ results }) => results.map(({ project_id }) => project_id)));
    for (const id of projects)
      getAll(apiPath`organization/projects/${id}/api_keys`).then(
        (keys) => setNames((all) => ({ ...all, ...Object.fromEntries(keys.map((key) => [key.id, nameOfKey(key)])) })),
        () => {},
      );
  }, [buckets]);
  return names;
}
