// What the boxes of the Playground take: schemas, functions, MCP servers. Each is checked before it is sent.

import { resolve, violations } from "./validate.js";

const node = { $ref: "#/$defs/node" };
const nodes = { type: "array", items: node, minItems: 1 };
const named = { type: "object", additionalProperties: node };
const size = { type: "integer", minimum: 0 };
const NAME = { type: "string", pattern: "^[A-Za-z0-9_.-]{1,128}$" };
const TYPE = { enum: ["string", "number", "integer", "boolean", "object", "array", "null"] };

/** The rules of JSON Schema for the keywords that schemas of answers and functions have. */
const META = {
  $ref: "#/$defs/object",
  $defs: {
    node: { anyOf: [{ type: "boolean" }, { $ref: "#/$defs/object" }] },
    object: {
      type: "object",
      properties: {
        type: { anyOf: [TYPE, { type: "array", items: TYPE, minItems: 1, uniqueItems: true }] },
        properties: named,
        patternProperties: named,
        $defs: named,
        definitions: named,
        required: { type: "array", items: { type: "string" }, uniqueItems: true },
        enum: { type: "array" },
        items: node,
        additionalProperties: node,
        propertyNames: node,
        contains: node,
        not: node,
        prefixItems: nodes,
        anyOf: nodes,
        oneOf: nodes,
        allOf: nodes,
        title: { type: "string" },
        description: { type: "string" },
        $ref: { type: "string" },
        pattern: { type: "string" },
        format: { type: "string" },
        minLength: size,
        maxLength: size,
        minItems: size,
        maxItems: size,
        minProperties: size,
        maxProperties: size,
        minimum: { type: "number" },
        maximum: { type: "number" },
        exclusiveMinimum: { type: "number" },
        exclusiveMaximum: { type: "number" },
        multipleOf: { type: "number", exclusiveMinimum: 0 },
        uniqueItems: { type: "boolean" },
      },
    },
  },
};

const FUNCTION = {
  type: "object",
  properties: { name: NAME, description: { type: "string" }, parameters: node, output_schema: node, strict: { type: "boolean" } },
  required: ["name"],
  $defs: META.$defs,
};
const SERVER = {
  type: "object",
  properties: { server_label: { type: "string", minLength: 1 }, server_url: { type: "string", pattern: "^https?://" }, connector_id: { type: "string" } },
  required: ["server_label"],
};
const each = (value) => [value].flat();
const allOf = (schema, value) => violations({ type: "array", items: schema, $defs: META.$defs }, each(value));

/** Return the violations of a JSON Schema, its references and patterns included. */
export function schemaProblems(schema) {
  const found = violations(META, schema);
  const visit = (each, path) => {
    if (!each || typeof each !== "object") return;
    if (typeof each.$ref === "string" && resolve(schema, each.$ref) === undefined)
      found.push({ path: `${path}/$ref`, rule: "$ref", message: `points to nothing: ${each.$ref}` });
    if (typeof each.pattern === "string" && !isPattern(each.pattern))
      found.push({ path: `${path}/pattern`, rule: "pattern", message: "is no regular expression" });
    for (const [name, child] of Object.entries(each)) visit(child, `${path}/${name}`);
  };
  visit(schema, "");
  return found;
}

function isPattern(pattern) {
  try {
    return Boolean(new RegExp(pattern, "u"));
  } catch {
    return false;
  }
}

function functionProblems(value) {
  const found = allOf(FUNCTION, value);
  if (found.length) return found;
  return each(value).flatMap((tool, index) =>
    ["parameters", "output_schema"].flatMap((field) =>
      tool[field] ? schemaProblems(tool[field]).map((problem) => ({ ...problem, path: `/${index}/${field}${problem.path}` })) : [],
    ),
  );
}

const CHECKS = { schema: schemaProblems, functions: functionProblems, mcpServers: (value) => allOf(SERVER, value) };

/** Return what is wrong with the text of a box, "" if nothing is: `field` is "schema", "functions" or "mcpServers". */
export function problemOf(field, text) {
  if (!text.trim()) return "";
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
  const [first] = CHECKS[field](value);
  return first ? `${first.path || "The whole"} ${first.message}.` : "";
}
