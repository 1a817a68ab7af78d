// The dialog of the key: sign in at the identity provider, sign out, or enter a key.

import { readKey, readSession, saveKey } from "../session.js";
import { beginSignIn, hostOf, signOut } from "../sign_in.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Time } from "./states.js";

/** `reason` says what went wrong, `isWanted` that the server wants a key; `signIn` is null where keys are the only way. */
export function KeyDialog({ reason, isWanted, signIn, access, onSaved, onClose }) {
  const session = readSession();
  const isIn = session && !isWanted;
  const [types, setTypes] = useState(!isIn && !signIn);
  const dialog = useRef(null);
  useEffect(() => dialog.current.querySelector(".primary:not([type=submit]), input")?.focus(), [types]);
  const Body = types ? KeyForm : isIn ? SignedIn : SignInForm;
  return html`<div class="veil" onClick=${(event) => event.target === event.currentTarget && onClose()}>
    <div class="dialog" role="dialog" aria-modal="true" aria-labelledby="key-title" ref=${dialog}>
      <h2 id="key-title">${types ? "API key" : isIn ? "Signed in" : "Sign in"}</h2>
      ${reason && html`<p role="alert" class="reason">${reason}</p>`}
      <${Body} session=${session} signIn=${signIn} access=${access} isWanted=${isWanted && !reason} onSaved=${onSaved} onClose=${onClose}>
        ${(isIn || signIn) && html`<button type="button" class="plain" onClick=${() => setTypes(!types)}>${types ? (isIn ? "Back" : "Sign in instead") : isIn ? "Use an API key" : "Use an API key instead"}</button>`}
        <span class="grow"></span>
      <//>
    </div>
  </div>`;
}

function SignInForm({ signIn, isWanted, onClose, children }) {
  const [error, setError] = useState(isSecureContext ? signIn.problem || "" : "Signing in needs HTTPS, and this page was opened without it.");
  const host = signIn.problem ? "" : hostOf(signIn);
  const begin = () => beginSignIn(signIn).catch((problem) => setError(problem.message));
  return html`${error && html`<p class="reason" role="alert">${error}</p>`}
    ${host &&
    html`<p class="quiet">${isWanted ? "This server wants to know who you are. " : ""}You go to ${host} and come back to this view. The token that it sends is the key of this tab.</p>
      <button type="button" class="primary wide" disabled=${!isSecureContext} onClick=${begin}>Sign in with ${host}</button>`}
    <div class="row last">${children}<button type="button" onClick=${onClose}>Cancel</button></div>`;
}

function SignedIn({ session, access, onClose, children }) {
  const host = hostOf(session.signIn);
  const facts = [
    ["As", access.id],
    ["At", host],
    ["Until", html`<${Time} at=${session.endsAt} />${session.refreshToken && html` <span class="quiet small">renewed while you work</span>`}`],
  ];
  return html`<dl class="key-facts">${facts.map(([name, value]) => value && html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${session.problem && html`<p class="reason">${host} does not renew it. ${session.problem}</p>`}
    <div class="row last">${children}<button type="button" onClick=${signOut}>Sign out</button><button type="button" class="primary" onClick=${onClose}>Close</button></div>`;
}

function KeyForm({ isWanted, onSaved, onClose, children }) {
  const [key, setKey] = useState(readSession() ? "" : readKey());
  const save = (event) => {
    event.preventDefault();
    saveKey(key.trim());
    onSaved();
  };
  return html`<form onSubmit=${save}>
    <p class="quiet">${isWanted ? "This server wants an API key." : "Sent with each request."} It stays in this tab and is gone when the tab is closed.</p>
    <label>Key<input type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} /></label>
    <div class="row last">${children}<button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary">Use this key</button></div>
  </form>`;
}
