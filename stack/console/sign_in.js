// Sign-in at an identity provider: the authorization code flow with PKCE (RFC 7636), as a public client without a secret.

import { SignInError, problemOf, readKey, readSession, requestTokens, saveKey, saveTokens } from "./session.js";

const PENDING = "stack.sign_in";
/** The address that the identity provider knows: this page without its query and its hash. */
const ADDRESS = location.origin + location.pathname;

const base64url = (bytes) => btoa(String.fromCharCode(...bytes)).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
const random = () => base64url(crypto.getRandomValues(new Uint8Array(32)));
const hashOfText = async (text) => base64url(new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text))));

export const hostOf = (signIn) => new URL(signIn.issuer).host;

/** Return how people sign in here; null where they cannot, {problem} where the server does not know at the moment. */
export async function loadSignIn() {
  try {
    const response = await fetch(new URL("console/sign_in.json", document.baseURI), { cache: "no-cache" });
    const answer = await response.json();
    return response.ok ? answer : { problem: answer.error.message };
  } catch {
    return null;
  }
}

/** Go to the identity provider. The view of now is shown again when it sends the person back. */
export async function beginSignIn(signIn) {
  const pending = { signIn, state: random(), nonce: random(), verifier: random(), hash: location.hash };
  const url = new URL(signIn.authorization_endpoint);
  const fields = {
    response_type: "code",
    client_id: signIn.client_id,
    redirect_uri: ADDRESS,
    scope: signIn.scopes.join(" "),
    state: pending.state,
    nonce: pending.nonce,
    code_challenge: await hashOfText(pending.verifier),
    code_challenge_method: "S256",
  };
  for (const [name, value] of Object.entries(fields)) url.searchParams.set(name, value);
  sessionStorage.setItem(PENDING, JSON.stringify(pending));
  location.assign(url);
}

/** Take the identity provider's answer out of the address, at once, and return it; null where there is none. */
export function takeAnswer() {
  const fields = Object.fromEntries(new URLSearchParams(location.search));
  if (!fields.code && !fields.error) return null;
  const pending = JSON.parse(sessionStorage.getItem(PENDING) || "null");
  sessionStorage.removeItem(PENDING); // an answer counts once
  const isOwn = Boolean(pending) && fields.state === pending.state && (!fields.iss || fields.iss === pending.signIn.issuer);
  history.replaceState(null, "", ADDRESS + (isOwn ? pending.hash : location.hash));
  return { fields, pending: isOwn ? pending : null };
}

/** Exchange the code of an answer for tokens, and use them; return why that failed, empty where it did not. */
export async function completeSignIn({ fields, pending }) {
  // words of an answer that was not asked for are not shown: anyone can write them into a link
  if (!pending) return "You were sent here with an answer to a sign-in that this tab did not begin, or that is over. Nothing was done with it.";
  const host = hostOf(pending.signIn);
  try {
    if (fields.error) throw new SignInError(problemOf(fields));
    const { code } = fields;
    const tokens = await requestTokens(pending.signIn, { grant_type: "authorization_code", code, redirect_uri: ADDRESS, code_verifier: pending.verifier });
    saveTokens(pending.signIn, tokens, { nonce: pending.nonce });
    return "";
  } catch (error) {
    return `${host} did not sign you in. ${error.message}`;
  }
}

/** Why the server refuses the key of now, in a sentence; empty where there is no key. */
export function refusalOf() {
  const session = readSession();
  if (!readKey()) return "";
  if (!session) return "This server does not have this API key, or it has expired.";
  const host = hostOf(session.signIn);
  if (Date.now() / 1000 < session.endsAt) return `You signed in at ${host}, but this server does not accept its token: the server's log says why.`;
  const ended = `Your sign-in ended at ${new Date(session.endsAt * 1000).toLocaleTimeString(undefined, { timeStyle: "short" })}`;
  return session.problem ? `${ended}: ${host} does not renew it. ${session.problem}` : `${ended}.`;
}

/** Forget the tokens here, and end the session at the identity provider where it has an address for that. */
export function signOut() {
  const { signIn, idToken } = readSession();
  saveKey("");
  if (!signIn.end_session_endpoint) {
    location.reload(); // what the views have in memory goes too
    return;
  }
  const url = new URL(signIn.end_session_endpoint);
  addEventListener("pageshow", () => location.reload()); // the button Back would show what the views had in memory
  url.searchParams.set("client_id", signIn.client_id);
  url.searchParams.set("post_logout_redirect_uri", ADDRESS);
  if (idToken) url.searchParams.set("id_token_hint", idToken);
  location.assign(url);
}
