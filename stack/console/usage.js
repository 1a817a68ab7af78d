// Usage from buckets to sums: what is measured, by which groups, over which range.

/** [name, value of a result]. A further figure of the server, such as costs, is a further row here. */
export const MEASURES = [
  ["tokens", (row) => row.input_tokens + row.output_tokens],
  ["requests", (row) => row.num_model_requests],
  ["input tokens", (row) => row.input_tokens],
  ["cached input", (row) => row.input_cached_tokens],
  ["output tokens", (row) => row.output_tokens],
  ["reasoning", (row) => row.output_reasoning_tokens],
  ["tool calls", (row) => Object.values(row.tool_calls || {}).reduce((sum, count) => sum + count, 0)],
];

/** [name, width of a bucket, number of buckets]. */
export const RANGES = [
  ["24 hours", "1h", 24],
  ["7 days", "1h", 168],
  ["30 days", "1d", 30],
];
const WIDTHS_S = { "1h": 3600, "1d": 86_400 };
export const MOST_GROUPS = 6;

/** The query of a range that ends now. Buckets begin at whole hours and days (UTC). */
export function queryOf(range, now = Date.now() / 1000) {
  const [, bucket_width, limit] = RANGES.find(([name]) => name === range) || RANGES[1];
  const width = WIDTHS_S[bucket_width];
  return { start_time: (Math.floor(now / width) - limit + 1) * width, bucket_width, limit };
}

/** Sum buckets by `groupOf(result)`: {times, groups: [{id, sums: {measure: number}, values: {measure: [per bucket]}}]}, the
 * largest first. Groups after the first MOST_GROUPS are one, "others", in the chart alone. */
export function sumByGroup(buckets, groupOf) {
  const groups = new Map();
  buckets.forEach((bucket, index) => {
    for (const result of bucket.results) {
      const id = groupOf(result);
      if (!groups.has(id)) groups.set(id, { id, sums: {}, values: {} });
      const group = groups.get(id);
      for (const [measure, valueOf] of MEASURES) {
        const value = valueOf(result) || 0;
        group.sums[measure] = (group.sums[measure] || 0) + value;
        group.values[measure] ||= Array(buckets.length).fill(0);
        group.values[measure][index] += value;
      }
    }
  });
  return { times: buckets.map((bucket) => bucket.start_time), groups: [...groups.values()].sort((one, other) => other.sums.tokens - one.sums.tokens) };
}
