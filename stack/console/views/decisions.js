// The Playground's decisions: questions with fixed options about one input, and the probabilities that answer them.

import { call } from "../api.js";
import { EXAMPLE, bodyOf, lackOf, loadQuestions, newQuestion, saveQuestions } from "../decisions.js";
import { CodeSamples } from "../parts/code_samples.js";
import { Icon } from "../parts/icons.js";
import { JsonTree } from "../parts/json_tree.js";
import { Modes } from "../parts/modes.js";
import { Probabilities } from "../parts/probabilities.js";
import { QuestionForm } from "../parts/question_form.js";
import { Empty, Failure, Tabs } from "../parts/states.js";
import { UsageBar } from "../parts/usage_bar.js";
import { loadSettings, saveSettings } from "../settings.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";

const MOST_QUESTIONS = 400;
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

export function Decisions({ models }) {
  const [model, setModel] = useState(loadSettings().model);
  const [input, setInput] = useState("");
  const [questions, setQuestions] = useState(loadQuestions);
  const [result, setResult] = useState(null);
  const [failure, setFailure] = useState(null);
  const [asked, setAsked] = useState(null);
  const body = bodyOf(model, input, questions);
  const lack = lackOf(body);
  const current = useRef(null);

  useEffect(() => {
    if (models.length && !models.some(({ id }) => id === model)) setModel((models.find(({ id }) => !/embed|minilm/i.test(id)) || models[0]).id);
  }, [models]);
  useEffect(() => {
    const stop = (event) => event.key === "Escape" && current.current?.abort();
    addEventListener("keydown", stop);
    return () => {
      removeEventListener("keydown", stop);
      current.current?.abort();
    };
  }, []);

  const change = (next) => {
    setQuestions(next);
    saveQuestions(next);
  };
  const choose = (event) => {
    setModel(event.target.value);
    saveSettings({ ...loadSettings(), model: event.target.value });
  };
  const showExample = () => {
    setInput(EXAMPLE.input);
    change(EXAMPLE.questions());
  };

  async function decide(event) {
    event?.preventDefault();
    if (lack || asked) return;
    const control = (current.current = new AbortController());
    setFailure(null);
    setAsked(body);
    const startedAt = performance.now();
    try {
      const decision = await call("POST", "decisions", { body, signal: control.signal });
      setResult({ body, decision, ids: questions.map(({ id }) => id), ms: performance.now() - startedAt });
    } catch (error) {
      if (!control.signal.aborted) setFailure(error);
    } finally {
      setAsked(null);
    }
  }
  const onKeyDown = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && decide(event);
  const answerOf = ({ id }) => {
    const index = result ? result.ids.indexOf(id) : -1;
    return index < 0 ? null : { question: result.body.questions[index], answer: result.decision.answers[index] };
  };
  const isOther = result && (result.body.model !== model || result.body.input !== input);

  return html`<form class="page decisions" onSubmit=${decide} onKeyDown=${onKeyDown}>
    <header class="bar">
      <h1>Playground</h1>
      <${Modes} current="decisions" />
      <select aria-label="Model" value=${model} onChange=${choose}>${models.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}</select>
      <span class="grow"></span>
      <button type="button" onClick=${showExample}>Example</button>
      ${asked
        ? html`<button type="button" onClick=${() => current.current.abort()}>Stop</button>`
        : html`<button class="primary" disabled=${Boolean(lack)} title=${lack || "Ctrl + Enter"}>Decide</button>`}
    </header>
    ${failure && html`<${Failure} error=${failure} onRetry=${decide} />`}
    <label class="input-text">Input<textarea rows="4" placeholder="The text that the questions are about" value=${input} onInput=${(event) => setInput(event.target.value)}></textarea></label>
    <ol class="questions" aria-label="Questions">
      ${questions.map((question, index) => {
        const given = answerOf(question);
        return html`<li key=${question.id} class="question">
          <${QuestionForm}
            question=${question}
            number=${index + 1}
            onChange=${(next) => change(questions.map((each) => (each.id === next.id ? next : each)))}
            onRemove=${questions.length > 1 && (() => change(questions.filter((each) => each.id !== question.id)))}
          />
          <div class="answered" aria-live="polite">
            ${given
              ? html`<${Probabilities} question=${given.question} answer=${given.answer} isStale=${isOther || !same(given.question, body.questions[index])} />`
              : html`<p class="quiet small">${asked ? "The model reads the input…" : "The probabilities appear here."}</p>`}
          </div>
        </li>`;
      })}
    </ol>
    <div class="row wrap foot">
      <button type="button" disabled=${questions.length >= MOST_QUESTIONS} onClick=${() => change([...questions, newQuestion()])}><${Icon} name="plus" /> Add a question</button>
      <span class="quiet small" role="status">${lack}</span>
      <span class="grow"></span>
      ${result && html`<${UsageBar} usage=${result.decision.usage} totalMs=${result.ms} />`}
    </div>
    <${Exchange} body=${body} decision=${result?.decision} />
  </form>`;
}

/** What was sent and received, and the request as a program. */
function Exchange({ body, decision }) {
  const [tab, setTab] = useState("Code");
  return html`<section class="exchange" aria-label="Request and answer">
    <${Tabs} names=${["Code", "Request", "Answer"]} current=${tab} onChange=${setTab} label="Request and answer">
      ${tab === "Code" && html`<${CodeSamples} body=${body} api="decisions" />`}
      ${tab === "Request" && html`<${JsonTree} value=${body} open=${4} />`}
      ${tab === "Answer" && (decision ? html`<${JsonTree} value=${decision} open=${4} />` : html`<${Empty} title="No answer yet." />`)}
    <//>
  </section>`;
}
