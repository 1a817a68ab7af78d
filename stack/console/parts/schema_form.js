// A form from a JSON Schema, and a value shown by one. What a field cannot express is a box of JSON.

import { pretty } from "../format.js";
import { resolve } from "../schema/validate.js";
import { html, useState } from "../vendor/preact.js";
import { useUniqueId } from "./states.js";

/** The schema behind a reference, and the one alternative of a field that may be null. */
export function plain(schema, root) {
  let found = schema;
  for (let steps = 0; found?.$ref && steps < 16; steps += 1) found = resolve(root, found.$ref);
  const others = (found?.anyOf || found?.oneOf || []).filter((each) => each.type !== "null");
  if (others.length === 1 && !found.properties) return { ...plain(others[0], root), description: found.description || others[0].description };
  return found || {};
}

const typeOf = (schema) => [schema.type].flat().find((type) => type && type !== "null");

/** An empty value of a schema: required fields are there, others are absent. */
export function blank(schema, root = schema, depth = 0) {
  const node = plain(schema, root);
  if (node.default !== undefined) return node.default;
  if ("const" in node) return node.const;
  if (node.enum) return node.enum[0];
  const type = typeOf(node);
  if (type === "object" && depth < 8)
    return Object.fromEntries((node.required || []).filter((name) => node.properties?.[name]).map((name) => [name, blank(node.properties[name], root, depth + 1)]));
  return { string: "", boolean: false, array: [] }[type];
}

const hint = (schema) => [schema.type && [schema.type].flat().join(" or "), schema.format].filter(Boolean).join(", ");

export function SchemaField({ schema, root = schema, name, value, onChange, required = true }) {
  const node = plain(schema, root);
  const label = html`<span>${name}${required ? "" : html` <span class="quiet">optional</span>`} <span class="quiet mono">${hint(node)}</span></span>`;
  const note = node.description && html`<span class="quiet small">${node.description}</span>`;
  if (node.enum)
    return html`<label>${label}<select value=${JSON.stringify(value)} onChange=${(event) => onChange(event.target.value ? JSON.parse(event.target.value) : undefined)}>
      ${!required && html`<option value="">–</option>`}${node.enum.map((each) => html`<option key=${String(each)} value=${JSON.stringify(each)}>${String(each)}</option>`)}
    </select>${note}</label>`;
  const Field = FIELDS[typeOf(node)] || AnyField;
  return html`<${Field} node=${node} root=${root} label=${label} note=${note} name=${name} value=${value} onChange=${onChange} required=${required} />`;
}

const TextField = ({ label, note, value, onChange, required }) =>
  html`<label>${label}<input value=${value ?? ""} onInput=${(event) => onChange(event.target.value || required ? event.target.value : undefined)} />${note}</label>`;

const NumberField = ({ node, label, note, value, onChange }) =>
  html`<label>${label}<input
      type="number"
      step=${typeOf(node) === "integer" ? 1 : "any"}
      value=${value ?? ""}
      onInput=${(event) => onChange(event.target.value === "" ? undefined : Number(event.target.value))}
    />${note}</label>`;

const CheckField = ({ label, note, value, onChange }) =>
  html`<label class="check"><input type="checkbox" checked=${Boolean(value)} onChange=${(event) => onChange(event.target.checked)} />${label}</label>${note}`;

function ObjectField({ node, root, label, note, name, value, onChange }) {
  const fields = Object.entries(node.properties || {});
  if (!fields.length) return html`<${AnyField} label=${label} note=${note} value=${value} onChange=${onChange} />`;
  const change = (field) => (inner) => {
    const next = { ...value, [field]: inner };
    if (inner === undefined) delete next[field];
    onChange(next);
  };
  const inner = fields.map(
    ([field, schema]) =>
      html`<${SchemaField} key=${field} schema=${schema} root=${root} name=${field} value=${value?.[field]} required=${node.required?.includes(field) ?? false} onChange=${change(field)} />`,
  );
  return name ? html`<fieldset class="schema"><legend>${name}</legend>${note}${inner}</fieldset>` : html`<div class="schema">${note}${inner}</div>`;
}

function ListField({ node, root, note, name, value, onChange }) {
  const items = Array.isArray(value) ? value : [];
  const set = (index, inner) => onChange(items.map((each, other) => (other === index ? inner : each)));
  return html`<fieldset class="schema"><legend>${name || "items"}</legend>${note}
    ${items.map(
      (each, index) => html`<div class="row entry" key=${index}>
        <${SchemaField} schema=${node.items || {}} root=${root} name=${`${index + 1}`} value=${each} onChange=${(inner) => set(index, inner)} />
        <button type="button" class="plain" aria-label="Remove ${index + 1}" onClick=${() => onChange(items.filter((_, other) => other !== index))}>Remove</button>
      </div>`,
    )}
    <button type="button" onClick=${() => onChange([...items, blank(node.items || {}, root)])}>Add</button>
  </fieldset>`;
}

/** JSON of any kind; while it is none, the value stays what it was and the box says so. */
function AnyField({ label, note, value, onChange }) {
  const [text, setText] = useState(value === undefined ? "" : pretty(value));
  const [bad, setBad] = useState(false);
  const id = useUniqueId();
  const typed = (event) => {
    setText(event.target.value);
    try {
      onChange(event.target.value.trim() ? JSON.parse(event.target.value) : undefined);
      setBad(false);
    } catch {
      setBad(true);
    }
  };
  return html`<label>${label}<textarea rows="3" class="mono" value=${text} onInput=${typed} aria-invalid=${bad} aria-describedby=${bad ? id : undefined}></textarea>${note}
    ${bad && html`<span id=${id} class="bad small">This is not JSON.</span>`}</label>`;
}

const FIELDS = { string: TextField, number: NumberField, integer: NumberField, boolean: CheckField, object: ObjectField, array: ListField };

/** The fields of an object by its schema: name, value, type and description; `found` marks those that break it. */
export function SchemaValue({ schema, value, found = [] }) {
  const properties = plain(schema, schema).properties || {};
  const names = [...new Set([...Object.keys(properties), ...Object.keys(value)])];
  return html`<dl class="arguments">
    ${names.map((name) => {
      const node = plain(properties[name] || {}, schema);
      const mine = found.filter(({ path }) => path === `/${name}` || path.startsWith(`/${name}/`));
      return html`<div key=${name}>
        <dt title=${node.description || ""}><span class="mono">${name}</span> <span class="quiet small">${hint(node)}</span></dt>
        <dd>${name in value ? html`<${ArgumentText} value=${value[name]} />` : html`<span class="quiet">not set</span>`}
          ${mine.map((each) => html`<div key=${each.path + each.rule} class="bad small">${each.path} ${each.message}</div>`)}</dd>
      </div>`;
    })}
  </dl>`;
}

const ArgumentText = ({ value }) =>
  html`<pre class="wrap">${typeof value === "string" ? value : typeof value === "object" ? pretty(value) : String(value)}</pre>`;
