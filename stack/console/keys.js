// Keyboard: `g` and a letter goes to a view, `/` to the search box, `?` shows the list, Escape closes or stops.

export const SHORTCUTS = [
  ["Enter", "send; Shift + Enter begins a line (Settings: only ⌘/Ctrl + Enter sends)"],
  ["Esc", "stop the answer, close a panel"],
  ["/", "search"],
  ["g p", "Playground"],
  ["g r", "Responses"],
  ["g u", "Runs"],
  ["g c", "Conversations"],
  ["g e", "Agents, their sessions and schedules"],
  ["g f", "Files"],
  ["g t", "Traces"],
  ["g s", "Figures"],
  ["g a", "Usage of the key"],
  ["g m", "Team, for administrators"],
  ["?", "this list"],
];
const VIEWS = { p: "playground", r: "responses", u: "runs", c: "conversations", e: "agents", f: "files", t: "traces", s: "figures", a: "usage", m: "team" };

/** Listen to the page's shortcuts; `onHelp` shows the list. Return the function that stops it. */
export function listenToKeys(onHelp) {
  let goesAt = 0;
  const listener = (event) => {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (typing || event.metaKey || event.ctrlKey || event.altKey) return;
    if (event.key === "g") goesAt = event.timeStamp;
    else if (event.timeStamp - goesAt < 1000 && VIEWS[event.key]) {
      goesAt = 0;
      location.hash = `#/${VIEWS[event.key]}`;
    } else if (event.key === "?") onHelp();
    else if (event.key === "/") {
      const search = document.querySelector("[data-search]");
      if (search) {
        search.focus();
        event.preventDefault();
      }
    }
  };
  addEventListener("keydown", listener);
  return () => removeEventListener("keydown", listener);
}
