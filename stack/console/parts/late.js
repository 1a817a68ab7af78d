// What an answer may need and most do not: formulas as MathML, and colours of code. Their libraries are loaded with the first
// use; until then, and where one cannot be read, the text shows as it is.

const MOST_FORMULA_CHARS = 2000;
const MOST_CODE_CHARS = 20_000;
/** Formulas that are kept, so that a text that grows renders each of them once. */
const MOST_KEPT = 500;
/** Languages with colours, by the names that models write. */
const LANGUAGES = {
  ...{ python: "python", py: "python", python3: "python", javascript: "javascript", js: "javascript", jsx: "javascript", mjs: "javascript" },
  ...{ typescript: "typescript", ts: "typescript", tsx: "typescript", bash: "bash", sh: "bash", shell: "bash", zsh: "bash", console: "bash" },
  ...{ json: "json", jsonc: "json", yaml: "yaml", yml: "yaml", sql: "sql", rust: "rust", rs: "rust", go: "go", golang: "go", c: "c", h: "c" },
  ...{ cpp: "cpp", "c++": "cpp", java: "java", css: "css", html: "xml", xml: "xml", svg: "xml", markdown: "markdown", md: "markdown" },
  ...{ diff: "diff", patch: "diff", ini: "ini", toml: "ini", dockerfile: "dockerfile", docker: "dockerfile" },
};

/** Styles, which the policy of the page forbids: the rest of the MathML is enough. */
const STYLES = / style="[^"]*"/g;

const parts = new Map();
const waiting = new Set();
const formulas = new Map();
let version = 0;
let isMissing = false;

/** Return a loaded part; else null, and load it. A part that cannot be loaded stays away. */
function part(name, load) {
  if (parts.has(name)) return parts.get(name);
  parts.set(name, null);
  load().then(
    (loaded) => {
      parts.set(name, loaded);
      version += 1;
      [...waiting].forEach((callback) => callback());
    },
    () => {},
  );
  return null;
}

/** Call `work`; return [its result, True where something was missing that is being loaded]. */
export function lookingForMissing(work) {
  isMissing = false;
  const result = work();
  return [result, isMissing];
}

export const loadedVersion = () => version;

/** Call back with each part that is loaded; return the function that ends it. */
export function onLoaded(callback) {
  waiting.add(callback);
  return () => waiting.delete(callback);
}

/** The MathML of a formula in TeX, null where there is none (yet). */
export function formulaOf(tex, isDisplay) {
  if (tex.length > MOST_FORMULA_CHARS) return null;
  const key = `${isDisplay} ${tex}`;
  if (formulas.has(key)) return formulas.get(key);
  const temml = part("temml", async () => (await import("../vendor/temml.js")).default);
  if (!temml) {
    isMissing = true;
    return null;
  }
  let mathml = null;
  try {
    const options = { displayMode: isDisplay, throwOnError: true, maxExpand: 100, maxSize: [20, 200] };
    mathml = temml.renderToString(tex, options).replace(STYLES, "");
  } catch {
    // what is no formula stays the text that the model wrote
  }
  if (formulas.size >= MOST_KEPT) formulas.delete(formulas.keys().next().value);
  formulas.set(key, mathml);
  return mathml;
}

async function loadLanguage(language) {
  const [core, grammar] = await Promise.all([import("../vendor/highlight/core.js"), import(`../vendor/highlight/${language}.js`)]);
  core.default.registerLanguage(language, grammar.default);
  return core.default;
}

/** The HTML of code in its colours, null where there are none (yet). */
export function coloursOf(code, name) {
  const language = Object.hasOwn(LANGUAGES, name) && LANGUAGES[name];
  if (!language || code.length > MOST_CODE_CHARS) return null;
  const highlight = part(language, () => loadLanguage(language));
  if (highlight) return highlight.highlight(code, { language, ignoreIllegals: true }).value;
  isMissing = true;
  return null;
}
