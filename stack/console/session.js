// The key of this tab, and the sign-in that it came from. Both are in sessionStorage, and gone when the tab is closed.

const KEY = "stack.key";
const SESSION = "stack.session";
/** Seconds before its end, at most, in which a token is renewed; of a short one it is the last fifth of its time. */
const RENEW_S = 60;
/** Seconds after which a renewal may be tried again. */
const PAUSE_S = 10;

const now = () => Date.now() / 1000;

/** An identity provider's refusal, in its own words; `isFinal` is false where it could not be reached. */
export class SignInError extends Error {
  constructor(message, { isFinal = true } = {}) {
    super(message);
    this.isFinal = isFinal;
  }
}

export const readKey = () => sessionStorage.getItem(KEY) || "";

/** Use a key that was typed; a sign-in ends here. */
export function saveKey(key) {
  sessionStorage.removeItem(SESSION);
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** The sign-in that the key came from: {signIn, endsAt, renewAt, refreshToken, idToken}; null for a key that was typed. */
export const readSession = () => JSON.parse(sessionStorage.getItem(SESSION) || "null");

/** The claims of a JSON Web Token, which the server checks; null for another text. */
function claimsOf(token) {
  try {
    const body = token.split(".")[1].replace(/-/g, "+").replace(/_/g, "/");
    return JSON.parse(new TextDecoder().decode(Uint8Array.from(atob(body), (char) => char.charCodeAt(0))));
  } catch {
    return null;
  }
}

/** Use the tokens that an identity provider has sent. Throws SignInError. */
export function saveTokens(signIn, tokens, { nonce, before } = {}) {
  const key = tokens[signIn.token];
  const claims = typeof key === "string" ? claimsOf(key) : null;
  if (!claims) {
    const what = signIn.token === "id_token" ? "no ID token" : "an access token that is no JSON Web Token, or none";
    throw new SignInError(`It sent ${what}. The operator of this server chooses the token with sign_in.token.`);
  }
  const idToken = typeof tokens.id_token === "string" ? tokens.id_token : before?.idToken;
  if (nonce && tokens.id_token && claimsOf(tokens.id_token)?.nonce !== nonce) throw new SignInError("Its token belongs to another sign-in. Try again.");
  const endsAt = Number(claims.exp) || now();
  const life = Math.max(endsAt - now(), 0); // 0 where the clock of this machine is ahead
  const renewAt = Math.max(endsAt - Math.min(RENEW_S, life / 5), now() + Math.min(PAUSE_S, life / 2 || PAUSE_S));
  const refreshToken = tokens.refresh_token || before?.refreshToken;
  sessionStorage.setItem(KEY, key);
  sessionStorage.setItem(SESSION, JSON.stringify({ signIn, endsAt, renewAt, refreshToken, idToken }));
}

/** Ask the token endpoint as a public client; return its answer. Throws SignInError. */
export async function requestTokens(signIn, fields) {
  const body = new URLSearchParams({ client_id: signIn.client_id, ...fields });
  const init = { method: "POST", body, headers: { accept: "application/json" }, credentials: "omit", cache: "no-store", redirect: "error" };
  let response;
  let answer;
  try {
    response = await fetch(signIn.token_endpoint, init);
    answer = await response.json().catch(() => null);
  } catch {
    const remedy = "It may be away, or not admit this page's origin (CORS).";
    throw new SignInError(`Its token endpoint cannot be reached from this page. ${remedy}`, { isFinal: false });
  }
  if (response.ok && answer) return answer;
  const isFinal = response.status < 500 && response.status !== 429;
  throw new SignInError(problemOf(answer) || `Its token endpoint answered with status ${response.status}.`, { isFinal });
}

/** The text of an OAuth error (RFC 6749, 4.1.2.1 and 5.2), empty where there is none. */
export function problemOf(fields) {
  const texts = [fields?.error_description, fields?.error].filter((text) => typeof text === "string" && text);
  return (texts.length > 1 ? `${texts[0]} (${texts[1]})` : texts[0] || "").slice(0, 500);
}

let renewal = null;

/** Return the key for the next request; one from a sign-in is renewed shortly before its end, where that is possible. */
export async function currentKey() {
  const session = readSession();
  if (session?.refreshToken && now() >= session.renewAt) {
    renewal ||= renew(session).finally(() => (renewal = null));
    await renewal;
  }
  return readKey();
}

async function renew(session) {
  const { signIn, refreshToken } = session;
  let change;
  try {
    const tokens = await requestTokens(signIn, { grant_type: "refresh_token", refresh_token: refreshToken });
    change = () => saveTokens(signIn, tokens, { before: session });
  } catch (error) {
    // refused once, it is refused for ever; the key serves until its end
    const changes = error.isFinal ? { refreshToken: undefined, problem: error.message } : { renewAt: now() + PAUSE_S };
    change = () => sessionStorage.setItem(SESSION, JSON.stringify({ ...session, ...changes }));
  }
  if (readSession()?.refreshToken !== refreshToken) return; // signed out, or in again, meanwhile
  try {
    change();
  } catch (error) {
    sessionStorage.setItem(SESSION, JSON.stringify({ ...session, refreshToken: undefined, problem: error.message }));
  }
}
