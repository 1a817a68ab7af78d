// JSON Schema, draft 2020-12, in the part that APIs and functions use: https://json-schema.org/draft/2020-12
//
// `violations(schema, value)` returns [{path, rule, message}], empty for a valid value. Left out, and so never violated:
// `if`, `contains`, `dependent…`, `unevaluated…`, `$dynamicRef`, remote references and the meaning of `format`.

const MOST = 20;
const MOST_DEPTH = 64;

/** `root` is what `$ref`s point into. `outside` collects the paths of objects whose type a closed union does not know,
 * instead of reporting them. */
export function violations(schema, value, { root = schema, outside = null } = {}) {
  const found = [];
  check(schema, value, { root, outside, found, depth: 0 }, "");
  return found;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);
const isOfType = (value, type) => (type === "integer" ? Number.isInteger(value) : typeOf(value) === type);
const own = (object, name) => Object.hasOwn(object, name);
const lengthOf = (text) => (text.length < 1000 ? [...text].length : text.replace(/[\ud800-\udbff][\udc00-\udfff]/g, "_").length);
const step = (path, name) => `${path}/${String(name).replace(/~/g, "~0").replace(/\//g, "~1")}`;

export function equal(one, other) {
  if (one === other) return true;
  if (typeof one !== "object" || typeof other !== "object" || !one || !other || Array.isArray(one) !== Array.isArray(other)) return false;
  const names = Object.keys(one);
  return names.length === Object.keys(other).length && names.every((name) => own(other, name) && equal(one[name], other[name]));
}

/** Return the schema that `reference` (`#/a/b`) points to. */
export function resolve(root, reference) {
  if (!reference.startsWith("#")) return undefined;
  return reference
    .slice(2)
    .split("/")
    .filter(Boolean)
    .reduce((node, name) => (node && own(node, decode(name)) ? node[decode(name)] : undefined), root);
}

const decode = (name) => decodeURIComponent(name).replace(/~1/g, "/").replace(/~0/g, "~");

function report(run, path, rule, message) {
  if (run.found.length < MOST) run.found.push({ path, rule, message });
}

/** Check silently: true where `value` is valid. */
function fits(schema, value, run, path) {
  const found = [];
  check(schema, value, { ...run, found, outside: null }, path);
  return !found.length;
}

function check(schema, value, run, path) {
  if (schema === true || schema === undefined) return;
  if (schema === false) return report(run, path, "false", "is not allowed here");
  if (run.depth > MOST_DEPTH) return report(run, path, "depth", "is nested too deep to be checked");
  const inner = { ...run, depth: run.depth + 1 };
  if (schema.$ref !== undefined) {
    const target = resolve(run.root, schema.$ref);
    if (target === undefined) report(run, path, "$ref", `cannot be checked: there is no ${schema.$ref}`);
    else check(target, value, inner, path);
  }
  if (schema.type !== undefined && ![schema.type].flat().some((type) => isOfType(value, type)))
    return report(run, path, "type", `is ${an(typeOf(value))}, not ${[schema.type].flat().map(an).join(" or ")}`);
  if (schema.enum && !schema.enum.some((choice) => equal(choice, value))) report(run, path, "enum", `is not one of ${listed(schema.enum)}`);
  if (own(schema, "const") && !equal(schema.const, value)) report(run, path, "const", `is not ${listed([schema.const])}`);
  if (typeof value === "number") checkNumber(schema, value, run, path);
  else if (typeof value === "string") checkText(schema, value, run, path);
  else if (Array.isArray(value)) checkArray(schema, value, inner, path);
  else if (isObject(value)) checkObject(schema, value, inner, path);
  for (const each of schema.allOf || []) check(each, value, inner, path);
  if (schema.anyOf) checkUnion(schema.anyOf, "anyOf", value, inner, path);
  if (schema.oneOf) checkUnion(schema.oneOf, "oneOf", value, inner, path);
  if (schema.not !== undefined && fits(schema.not, value, inner, path)) report(run, path, "not", "is what the schema excludes");
}

const an = (type) => (/^[aeio]/.test(type) ? `an ${type}` : type === "null" ? type : `a ${type}`);
const listed = (values) => values.slice(0, 8).map((value) => JSON.stringify(value)).join(", ") + (values.length > 8 ? ", …" : "");

function checkNumber({ minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf }, value, run, path) {
  if (value < minimum) report(run, path, "minimum", `is less than ${minimum}`);
  if (value > maximum) report(run, path, "maximum", `is more than ${maximum}`);
  if (value <= exclusiveMinimum) report(run, path, "exclusiveMinimum", `is not more than ${exclusiveMinimum}`);
  if (value >= exclusiveMaximum) report(run, path, "exclusiveMaximum", `is not less than ${exclusiveMaximum}`);
  if (multipleOf && !Number.isInteger(value / multipleOf)) report(run, path, "multipleOf", `is no multiple of ${multipleOf}`);
}

function checkText({ minLength, maxLength, pattern }, value, run, path) {
  if (minLength !== undefined && lengthOf(value) < minLength) report(run, path, "minLength", `has fewer than ${minLength} characters`);
  if (maxLength !== undefined && lengthOf(value) > maxLength) report(run, path, "maxLength", `has more than ${maxLength} characters`);
  if (pattern === undefined) return;
  try {
    if (!new RegExp(pattern, "u").test(value)) report(run, path, "pattern", `does not match ${pattern}`);
  } catch {
    report(run, path, "pattern", `cannot be checked: ${pattern} is no regular expression`);
  }
}

function matches(pattern, text) {
  try {
    return new RegExp(pattern, "u").test(text);
  } catch {
    return false;
  }
}

function checkArray({ items, prefixItems, minItems, maxItems, uniqueItems }, value, run, path) {
  if (value.length < minItems) report(run, path, "minItems", `has fewer than ${minItems} items`);
  if (value.length > maxItems) report(run, path, "maxItems", `has more than ${maxItems} items`);
  const fixed = prefixItems || [];
  value.forEach((each, index) => check(index < fixed.length ? fixed[index] : items, each, run, step(path, index)));
  if (uniqueItems && value.some((each, index) => value.slice(0, index).some((other) => equal(each, other))))
    report(run, path, "uniqueItems", "holds an item twice");
}

function checkObject({ properties = {}, required = [], additionalProperties, patternProperties = {}, propertyNames, minProperties, maxProperties }, value, run, path) {
  for (const name of required) if (!own(value, name)) report(run, path, "required", `has no ${JSON.stringify(name)}`);
  const names = Object.keys(value);
  if (names.length < minProperties) report(run, path, "minProperties", `has fewer than ${minProperties} properties`);
  if (names.length > maxProperties) report(run, path, "maxProperties", `has more than ${maxProperties} properties`);
  const patterns = Object.entries(patternProperties);
  for (const name of names) {
    const matching = patterns.filter(([pattern]) => matches(pattern, name));
    if (own(properties, name)) check(properties[name], value[name], run, step(path, name));
    for (const [, each] of matching) check(each, value[name], run, step(path, name));
    if (propertyNames !== undefined) check(propertyNames, name, run, step(path, name));
    if (additionalProperties === undefined || own(properties, name) || matching.length) continue;
    if (additionalProperties === false) report(run, step(path, name), "additionalProperties", "is not in the schema");
    else check(additionalProperties, value[name], run, step(path, name));
  }
}

/** The types that an alternative admits by its property `type`, null where it does not fix one. */
function typesOf(schema, root) {
  const target = schema.$ref === undefined ? schema : resolve(root, schema.$ref);
  const types = target?.properties?.type?.enum;
  return types && target.required?.includes("type") ? types : null;
}

const refusesObjects = (schema, root) => {
  const target = schema.$ref === undefined ? schema : resolve(root, schema.$ref);
  return target?.type !== undefined && ![target.type].flat().includes("object");
};

/** False where an alternative's own `type` excludes the kind of the value. */
function mayBe(schema, value, root) {
  const target = schema.$ref === undefined ? schema : resolve(root, schema.$ref);
  return target?.type === undefined || [target.type].flat().some((type) => isOfType(value, type));
}

/** Where an object's `type` says which alternative is meant, report the errors of that one. */
function checkUnion(choices, rule, value, run, path) {
  const valid = choices.filter((choice) => fits(choice, value, run, path));
  if (valid.length === 1 || (valid.length && rule === "anyOf")) return check(valid[0], value, run, path);
  if (valid.length) return report(run, path, rule, `fits ${valid.length} of the alternatives, not one`);
  if (typeof value?.type === "string") {
    const named = choices.map((choice) => [choice, typesOf(choice, run.root)]).filter(([, types]) => types);
    const meant = named.find(([, types]) => types.includes(value.type));
    if (meant) return check(meant[0], value, run, path);
    const closed = named.length && choices.every((choice) => typesOf(choice, run.root) || refusesObjects(choice, run.root));
    if (closed && run.outside) return void run.outside.push(`${path} (${value.type})`);
    if (closed) return report(run, path, rule, `has a type that no alternative has: ${JSON.stringify(value.type)}`);
  }
  const possible = choices.filter((choice) => mayBe(choice, value, run.root));
  const others = possible.length ? possible : choices.filter((choice) => choice.type !== "null");
  if (others.length === 1) return check(others[0], value, run, path);
  return report(run, path, rule, "fits none of the alternatives");
}
