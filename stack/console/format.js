// Numbers, times and ids as text.

export const ms = (value) =>
  value === undefined || value === null || Number.isNaN(value)
    ? ""
    : value < 1000
      ? `${Math.round(value)} ms`
      : value < 60_000
        ? `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`
        : `${Math.floor(value / 60_000)} min ${Math.round((value % 60_000) / 1000)} s`;

export const bytes = (value) =>
  value < 1024 ? `${value} B` : value < 1024 ** 2 ? `${(value / 1024).toFixed(1)} KiB` : `${(value / 1024 ** 2).toFixed(1)} MiB`;

export const gigabytes = (value) => (value < 1e8 ? `${(value / 1e6).toFixed(0)} MB` : `${(value / 1e9).toFixed(1)} GB`);

export const count = (value) => (value ?? 0).toLocaleString("en-US");

/** Shorten an id in the middle; its title and its copy are whole. */
export const shortId = (id) => (id && id.length > 18 ? `${id.slice(0, 6)}…${id.slice(-6)}` : id || "");

/** Local time of a Unix time in seconds; `utc` is for its title. */
export const time = (seconds) => {
  if (!seconds) return "";
  const date = new Date(seconds * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return date.toLocaleString(undefined, today ? { timeStyle: "medium" } : { dateStyle: "medium", timeStyle: "short" });
};
export const utc = (seconds) => (seconds ? new Date(seconds * 1000).toISOString() : "");

/** A text in one line without the marks of Markdown. */
export const plain = (text) => (text || "").replace(/[*_`#>|~]+|\n/g, " ").replace(/\s+/g, " ").trim();

export const pretty = (value) => JSON.stringify(value, null, 2);

/** Return the JSON of a text laid out, or the text itself where it is none (yet). */
export const prettyText = (text) => {
  try {
    return pretty(JSON.parse(text));
  } catch {
    return text || "";
  }
};
