// Voice in and out by the browser, where it has them. Some browsers send what they hear to their maker: the button says so.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Icon } from "./icons.js";

const Recognition = globalThis.SpeechRecognition || globalThis.webkitSpeechRecognition;
const MOST_SPOKEN_CHARS = 4000;

/** A button that writes what its user says; `onText(words)` gets each sentence. */
export function Dictation({ onText }) {
  const [isOn, setOn] = useState(false);
  const [problem, setProblem] = useState("");
  const listener = useRef(null);
  const receive = useRef(onText);
  receive.current = onText;
  useEffect(() => () => listener.current?.abort(), []);
  if (!Recognition) return null;
  const toggle = () => {
    if (isOn) return listener.current.stop();
    const made = new Recognition();
    made.lang = navigator.language;
    made.continuous = true;
    made.onresult = (event) => {
      for (let index = event.resultIndex; index < event.results.length; index += 1) if (event.results[index].isFinal) receive.current(event.results[index][0].transcript.trim());
    };
    made.onerror = ({ error }) => setProblem(error === "not-allowed" ? "The browser does not let this page hear you." : `The browser hears nothing: ${error}.`);
    made.onend = () => setOn(false);
    listener.current = made;
    setProblem("");
    setOn(true);
    return made.start();
  };
  return html`<button type="button" class="plain" aria-pressed=${isOn} aria-label=${isOn ? "Stop dictating" : "Dictate"} title="Your browser writes what you say. It may send the sound to its maker." onClick=${toggle}><${Icon} name="microphone" /></button>
    ${problem && html`<span class="bad small" role="alert">${problem}</span>`}`;
}

/** A button that reads an answer aloud, by the browser's own voice. */
export function ReadAloud({ text }) {
  const [isOn, setOn] = useState(false);
  useEffect(() => () => isOn && speechSynthesis.cancel(), [isOn]);
  if (!globalThis.speechSynthesis) return null;
  const toggle = () => {
    speechSynthesis.cancel();
    if (isOn) return setOn(false);
    const words = new SpeechSynthesisUtterance(text.replace(/```[\s\S]*?```/g, " ").replace(/[*_`#>|]+/g, "").slice(0, MOST_SPOKEN_CHARS));
    words.onend = words.onerror = () => setOn(false);
    speechSynthesis.speak(words);
    return setOn(true);
  };
  return html`<button type="button" class="plain" aria-pressed=${isOn} aria-label=${isOn ? "Stop reading" : "Read aloud"} title="Read aloud" onClick=${toggle}><${Icon} name="speaker" /></button>`;
}
