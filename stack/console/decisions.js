// Decisions of the Playground: the questions as they are edited, and the body that they make.

export const KINDS = { predicate: "Predicate", choice: "Choice", score: "Score" };

const STORAGE = "stack.decisions";
let lastId = 0;

/** A question with an id for the page; `options` are kept while it is a predicate, which has none. */
export const newQuestion = (fields = {}) => ({ kind: "predicate", name: "", instructions: "", options: [newOption(), newOption()], ...fields, id: (lastId += 1) });
export const newOption = (text = "", note = "") => ({ text, note, id: (lastId += 1) });

export const EXAMPLE = {
  input: "I was charged twice for my order and want one of the charges back. This is the third time. I am furious.",
  questions: () => [
    newQuestion({ name: "refund", instructions: "The customer wants money back." }),
    newQuestion({
      kind: "choice",
      name: "topic",
      instructions: "What is the message about?",
      options: [newOption("billing", "payments and refunds"), newOption("bug", "software errors"), newOption("shipping")],
    }),
    newQuestion({ kind: "score", name: "anger", instructions: "How angry is the customer?", options: ["calm", "annoyed", "furious"].map((text) => newOption(text)) }),
  ],
};

/** Return the questions of the last visit, or one that is empty. */
export function loadQuestions() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORAGE) || "[]");
    if (stored.length) return stored.map((each) => newQuestion({ ...each, options: each.options.map(({ text, note }) => newOption(text, note)) }));
  } catch {
    // what another version of the page has stored is not needed
  }
  return [newQuestion()];
}

export const saveQuestions = (questions) => localStorage.setItem(STORAGE, JSON.stringify(questions));

/** Return the question as POST /v1/decisions takes it; rows without a text are no options. */
export function questionOf({ kind, name, instructions, options }) {
  const question = { type: kind, instructions, ...(name && { name }) };
  const texts = options.filter(({ text }) => text.trim());
  const named = (key) => texts.map(({ text, note }) => ({ [key]: text, ...(note && { description: note }) }));
  if (kind === "choice") return { ...question, choices: named("value") };
  return kind === "score" ? { ...question, levels: named("label") } : question;
}

export const bodyOf = (model, input, questions) => ({ model, input, questions: questions.map(questionOf) });

/** Return what a request still lacks, as a sentence; an empty text where nothing does. */
export function lackOf({ input, questions }) {
  if (!input.trim()) return "The input is empty.";
  for (const [index, { instructions, choices, levels }] of questions.entries()) {
    if (!instructions.trim()) return `Question ${index + 1} has no text.`;
    if ((choices || levels || [0, 1]).length < 2) return `Question ${index + 1} needs two ${choices ? "choices" : "levels"}.`;
  }
  return "";
}

/** Return an answer as [text, probability] pairs in the order of the question, and the index of the likeliest one. */
export function barsOf(question, answer) {
  if (answer.type === "predicate") return { bars: [["true", answer.probability], ["false", 1 - answer.probability]], likeliest: answer.probability < 0.5 ? 1 : 0 };
  const bars = answer.probabilities.map(({ value, label, probability }) => [String(label ?? value), probability]);
  return { bars, likeliest: bars.reduce((best, [, probability], index) => (probability > bars[best][1] ? index : best), 0) };
}
