// From Markdown to HTML that may be shown: parsed by marked, cleaned by DOMPurify as a Trusted Type.
//
// Model output is data. Links show their host and open elsewhere; pictures from outside load only after a click. Raw HTML shows
// as the text that it is.

import { marked } from "../vendor/marked.js";
import { coloursOf, formulaOf } from "./late.js";

/** The invisible character with which the numbered mark of a citation begins. */
export const MARK = "\u200b";
const ALLOWED_URI = /^(?:https?:|mailto:|blob:|#)/i;
const purify = globalThis.DOMPurify;

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A" && node.hasAttribute("href")) {
    node.setAttribute("rel", "noopener noreferrer");
    node.setAttribute("target", "_blank");
    try {
      const { host } = new URL(node.getAttribute("href"));
      const isMark = node.textContent.startsWith(MARK);
      if (isMark) node.className = "cite";
      node.setAttribute("title", isMark && node.title ? `${node.title} · ${host}` : host);
    } catch {
      node.removeAttribute("href");
    }
  }
  if (node.tagName === "IMG") {
    const source = node.getAttribute("src") || "";
    const link = node.ownerDocument.createElement("span");
    link.className = "blocked-image";
    link.dataset.src = /^https?:/i.test(source) ? source : "";
    link.textContent = `picture: ${node.getAttribute("alt") || source || "unnamed"}`;
    node.replaceWith(link);
  }
});

const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");

/** A block of code: its language, a button that copies it, and its colours where they are loaded. */
function code({ text, lang }) {
  const name = (lang || "").trim().split(/[\s{]/)[0].toLowerCase().slice(0, 30);
  const head = `<div class="code-head"><span>${escape(name)}</span><button type="button" class="plain copy-code">Copy</button></div>`;
  return `<div class="code-block">${head}<pre tabindex="0"><code>${coloursOf(text, name) ?? escape(text)}</code></pre></div>`;
}

/** A formula; while it cannot be rendered, it shows as it was written. */
function formula(raw, tex, isDisplay) {
  const mathml = formulaOf(tex.trim(), isDisplay);
  return mathml ? `<span class="formula">${mathml}</span>` : `<code class="formula">${escape(raw)}</code>`;
}

/** Formulas between $$ or \[ \], and between $ or \( \) in a line. A dollar before a space, or with a digit after its end, is
 * money. No formula contains the beginning of another, so that each character is read once. */
const DISPLAY = /^(?:\$\$([^$]{1,4000}?)\$\$|\\\[((?:(?!\\\[)[\s\S]){1,4000}?)\\\])/;
const INLINE = /^(?:\$(?![\s$])((?:\\.|[^$\\\n]){0,2000}?[^\s$\\])\$(?![\d$])|\\\(((?:(?!\\\()[^\n]){1,2000}?)\\\))/;
const formulaIn = (name, level, pattern, isDisplay) => ({
  name,
  level,
  start: (text) => {
    const at = text.search(level === "block" ? /(?<=^|\n)(?:\$\$|\\\[)/ : /\$|\\[([]/);
    return at < 0 ? undefined : at;
  },
  tokenizer(text) {
    const match = pattern.exec(text);
    return match ? { type: name, raw: match[0], tex: match[1] ?? match[2] } : undefined;
  },
  renderer: ({ raw, tex }) => (level === "block" ? `<p>${formula(raw, tex, isDisplay)}</p>` : formula(raw, tex, isDisplay)),
});

marked.use({
  renderer: { html: ({ text }) => escape(text), code },
  extensions: [formulaIn("displayBlock", "block", DISPLAY, true), formulaIn("displayInline", "inline", DISPLAY, true), formulaIn("inlineFormula", "inline", INLINE, false)],
});

const MATHML_TAGS = "math mrow mi mo mn mtext ms mspace msup msub msubsup mfrac msqrt mroot mover munder munderover mtable mtr mtd mstyle mpadded mphantom menclose mprescripts mmultiscripts none";
const MATHML_ATTR = "display displaystyle mathvariant stretchy fence separator lspace rspace minsize maxsize accent accentunder linethickness columnalign rowspacing columnspacing width height depth voffset scriptlevel form largeop movablelimits symmetric notation";

const CLEAN = {
  ALLOWED_TAGS: (
    `p br hr b strong i em s del u code pre kbd blockquote ul ol li h1 h2 h3 h4 h5 h6 a img table thead tbody tr th td sup sub span div button ${MATHML_TAGS}`
  ).split(" "),
  ALLOWED_ATTR: ["href", "title", "src", "alt", "align", "start", "class", "type", "tabindex", ...MATHML_ATTR.split(" ")],
  ALLOWED_URI_REGEXP: ALLOWED_URI,
  ALLOW_DATA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

export const clean = (markdown) => purify.sanitize(marked.parse(markdown, { async: false, gfm: true, breaks: true }), CLEAN);
