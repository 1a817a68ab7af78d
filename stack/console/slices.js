// Work in slices: what may take long is cut into tasks of a few milliseconds, so that frames and keys come in between.

/** The longest that one task spends on work that can go on in the next, in ms: half of a frame at 60 Hz. */
const SLICE_MS = 8;

const channel = new MessageChannel();
const waiting = [];
let startedAt = null;

// A message is a task of its own. setTimeout would be one too, but waits at least 4 ms once timers are nested.
channel.port1.onmessage = () => {
  startedAt = null;
  waiting.shift()?.();
};

const post = (callback) => {
  waiting.push(callback);
  channel.port2.postMessage(null);
};

/** True until the work of this task has taken SLICE_MS, counted from the first call in the task. */
export function hasTime() {
  if (startedAt === null) {
    startedAt = performance.now();
    post(() => {});
  }
  return performance.now() - startedAt < SLICE_MS;
}

/** Resolve in the next task. */
export const nextTask = () => new Promise(post);

/** Call `work` in a task of its own; return the function that drops it. */
export function later(work) {
  let isWanted = true;
  post(() => isWanted && work());
  return () => (isWanted = false);
}
