// Tests of the page's modules that need no page. `check(load)` returns what is wrong, as sentences; `load(path)` imports a
// module of the page. Node runs it (see the end), and where there is no Node, Chromium.

export async function check(load) {
  const problems = [];
  const same = (what, got, wanted) => JSON.stringify(got) === JSON.stringify(wanted) || problems.push(`${what}: ${JSON.stringify(got)} is not ${JSON.stringify(wanted)}`);

  const { bytes, count, gigabytes, ms, plain, prettyText, shortId, time } = await load("format.js");
  same("ms", [undefined, 0, 999, 1000, 12_345, 61_000].map(ms), ["", "0 ms", "999 ms", "1.00 s", "12.3 s", "1 min 1 s"]);
  same("bytes", [0, 1023, 1536, 5 * 1024 ** 2].map(bytes), ["0 B", "1023 B", "1.5 KiB", "5.0 MiB"]);
  same("gigabytes", [98_000_000, 12_109_566_560].map(gigabytes), ["98 MB", "12.1 GB"]);
  same("count", [undefined, 0, 1234].map(count), ["0", "0", "1,234"]);
  same("shortId", ["", "short", "resp_0123456789abcdef"].map(shortId), ["", "short", "resp_0…abcdef"]);
  same("plain", plain("## The **Loire**\n\n| a | b |\n`x`"), "The Loire a b x");
  same("prettyText", ['{"a":1}', "no { json"].map(prettyText), ['{\n  "a": 1\n}', "no { json"]);
  same("time of nothing", time(0), "");

  const { hashOf, parseHash } = await load("route.js");
  for (const route of [{ view: "responses", id: "resp_1", tab: "tree", params: { q: "a b&c" } }, { view: "files", id: "", tab: "", params: {} }]) {
    const { view, id, tab, params } = parseHash(hashOf(route));
    same("a route comes back", { view, id, tab, params }, route);
  }
  same("no hash", parseHash("").view, "playground");
  same("empty params are left out", hashOf({ view: "runs", params: { a: "", b: null, c: 0 } }), "#/runs?c=0");

  const { emptyState, openCalls, reduce } = await load("reducer.js");
  const item = { type: "function_call", id: "fc_1", arguments: "" };
  const events = [
    { type: "response.output_item.added", output_index: 0, item, sequence_number: 1 },
    { type: "response.function_call_arguments.delta", output_index: 0, delta: '{"a"', sequence_number: 2 },
    { type: "response.from_the_future", output_index: 0, sequence_number: 3 },
    { type: "response.function_call_arguments.delta", output_index: 9, delta: "lost", sequence_number: 4 },
    { type: "response.function_call_arguments.delta", output_index: 0, delta: ":1}", sequence_number: 5 },
  ];
  const before = emptyState();
  const after = events.reduce((state, event) => reduce(state, event), before);
  same("deltas join", after.items[0].arguments, '{"a":1}');
  same("the last number", after.lastNumber, 5);
  same("states are not changed", before, emptyState());
  same("open calls", openCalls([...after.items, { type: "message" }, undefined]).length, 1);

  const { readEvents } = await load("sse.js");
  const encoded = new TextEncoder().encode(': comment\n\nevent: x\ndata: {"n":\ndata: 1}\n\ndata: {"n":"é"}\n\ndata: [DONE]\n\ndata: {"n":3}\n\n');
  const pieces = [...encoded].map((byte) => Uint8Array.of(byte)); // every character is cut, the two bytes of é too
  const body = new ReadableStream({ start: (stream) => (pieces.forEach((piece) => stream.enqueue(piece)), stream.close()) });
  const read = [];
  for await (const { event } of readEvents(body)) read.push(event.n);
  same("events of a stream in pieces", read, [1, "é"]);
  return problems;
}

if (globalThis.process?.argv?.[2]) {
  const folder = `file://${process.argv[2]}/`;
  console.log(JSON.stringify(await check((path) => import(folder + path))));
  process.exit(0); // an open channel of messages would keep Node
}
