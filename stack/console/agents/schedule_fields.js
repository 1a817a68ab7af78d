// The fields of a schedule as a form has them, and the bodies that make or change it.

import { userMessage } from "./api.js";

export const TARGETS = { new_session: "a new session", existing_session: "a message to a session", response: "a background response" };
/** [expression, in words]. */
export const EXAMPLES = [
  ["0 * * * *", "every hour"],
  ["*/15 * * * *", "every 15 minutes"],
  ["0 8 * * *", "every day at 8:00"],
  ["0 8 * * MON-FRI", "on weekdays at 8:00"],
  ["0 9 * * MON", "on Mondays at 9:00"],
  ["0 9 1 * *", "on the first of the month at 9:00"],
  ["0 18 L * *", "on the last of the month at 18:00"],
];
export const ownZone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
export const zones = () => [...new Set([ownZone(), "UTC", ...(Intl.supportedValuesOf?.("timeZone") || [])])];

const HOUR_S = 3600;
const pad = (number) => String(number).padStart(2, "0");
/** Unix seconds as a field of the type datetime-local has them, and back. */
export function localOf(seconds) {
  const date = new Date(seconds * 1000);
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}T${pad(date.getHours())}:${pad(date.getMinutes())}`;
}
const secondsOf = (local) => Math.floor(new Date(local).getTime() / 1000);

/** The text of a target's input; null for one of several parts, which a form of one text cannot show. */
function textOf(input) {
  if (typeof input === "string") return input;
  const [message, ...others] = input || [];
  const [part, ...parts] = Array.isArray(message?.content) ? message.content : [];
  if (others.length || parts.length) return null;
  if (typeof message?.content === "string") return message.content;
  return part?.type === "input_text" ? part.text : null;
}

const inputOf = (target) => (target.type === "existing_session" ? target.instructions : target.type === "response" ? target.request?.input : target.input);
const whoOf = (target) => target.agent_id || (target.type === "new_session" ? `model:${target.agent?.model}` : target.request?.model ? `model:${target.request.model}` : "");

export function fieldsOf(schedule) {
  const target = schedule?.target || { type: "new_session" };
  const text = schedule ? textOf(inputOf(target)) : "";
  return {
    name: schedule?.name || "",
    type: schedule?.type || "periodic",
    expression: schedule?.expression || "0 8 * * MON-FRI",
    timezone: schedule?.timezone || ownZone(),
    runAt: localOf(schedule?.run_at || Math.floor(Date.now() / 1000) + HOUR_S),
    target: target.type,
    who: schedule ? whoOf(target) : "",
    session: target.session_id || "",
    hasWorkspace: (target.environment?.type || "none") !== "none",
    text: text ?? "",
    isText: text !== null,
  };
}

function targetOf(fields, before) {
  const model = fields.who.startsWith("model:") ? fields.who.slice(6) : "";
  const input = fields.isText ? [userMessage(fields.text)] : undefined;
  if (fields.target === "existing_session") return { type: "existing_session", session_id: fields.session.trim(), instructions: fields.text };
  if (fields.target === "response") return { type: "response", request: { ...before?.request, model: model || `agent/${fields.who}`, input: fields.isText ? fields.text : before.request.input } };
  const who = model ? { agent: { ...before?.agent, model } } : { agent_id: fields.who };
  const { agent: _agent, agent_id: _id, ...rest } = before || { type: "new_session", environment: { type: fields.hasWorkspace ? "openai_hosted" : "none" } };
  return { ...rest, ...who, input: input || before.input };
}

/** The body that makes a schedule, or the fields that a change sends. */
export function bodyOf(fields, schedule) {
  const times = fields.type === "once" ? { run_at: secondsOf(fields.runAt) } : { expression: fields.expression.trim(), timezone: fields.timezone.trim() };
  if (!schedule) return { type: fields.type, name: fields.name.trim(), ...times, target: targetOf(fields) };
  const before = fieldsOf(schedule);
  const changed = (...names) => names.some((name) => fields[name] !== before[name]);
  const body = {};
  if (changed("name")) body.name = fields.name.trim();
  if (changed("expression", "timezone", "runAt")) Object.assign(body, times);
  if (changed("who", "session", "text")) body.target = targetOf(fields, schedule.target);
  return body;
}

/** What a form still lacks, as a sentence. */
export function lackOf({ name, target, who, session, text, isText, type, runAt, expression }) {
  if (!name.trim()) return "It has no name.";
  if (type === "once" ? !runAt : !expression.trim()) return "It has no time.";
  if (target === "existing_session" ? !session.trim() : !who) return target === "existing_session" ? "It names no session." : "It names no agent.";
  return isText && !text.trim() ? "It has no message." : "";
}
