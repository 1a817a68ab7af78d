"""BenchPlan: the load of one `stack bench`, read from the command line."""

import argparse
import itertools
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast, get_args

import orjson

Mode = Literal["streams", "requests", "chains", "tools", "batches", "background"]
_DEFAULT_URL: Final = "http://127.0.0.1:8321/v1"
_DEFAULT_INPUT: Final = "Describe in a few sentences the harbour of a small town in the early morning."
_DEFAULT_DURATION_S: Final = 10.0
_MAX_CLIENTS: Final = 20_000
_MAX_INPUT_WORDS: Final = 1_000_000
_EPILOG: Final = """\
modes:
  streams     streamed responses
  requests    responses that are not streamed
  chains      streamed turns with previous_response_id, --turns of them, then a new chain
  tools       a function call, its output in a second request, the answer; with --tool one response that has it
  batches     each client has one batch of --lines requests at a time
  background  background responses, polled until they end

A client sends its next request when it has the response to the one before. Requests in progress when the duration is
over are completed and count. Ctrl-C ends the run and prints the figures so far. Exit code 1: nothing was completed.
"""


@dataclass(frozen=True)
class BenchPlan:
    """Load of one run; all times in seconds."""

    url: str
    """Base URL of the API, with its /v1."""
    key: str = "none"
    metrics_key: str = "none"
    model: str | None = None
    mode: Mode = "streams"
    clients: int = 16
    duration_s: float | None = None
    requests: int | None = None
    """Number of requests (batches: lines) of all clients together; None: until `duration_s` is over."""
    input: str = _DEFAULT_INPUT
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields that are added to the body of each request."""
    turns: int = 10
    lines: int = 100
    tool: str | None = None
    timeout_s: float = 300.0
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:6])
    serials: Iterator[int] = field(default_factory=lambda: itertools.count(1), compare=False)

    def with_model(self, model: str) -> "BenchPlan":
        return replace(self, model=model)

    def next_input(self) -> str:
        """Return the text of the next request; its beginning differs from all others, so that no prefix cache of an
        engine makes the run faster than new prompts are."""
        return f"[{self.run_id} {next(self.serials)}] {self.input}"

    def body(self, **fields: Any) -> bytes:
        """Return the body of a Responses request."""
        return orjson.dumps({"model": self.model, **fields, **self.fields})


@dataclass(frozen=True)
class Output:
    """Form of the result: a table or JSON, and the file of an earlier run that it is compared with."""

    as_json: bool
    compare_path: str | None


def parse_arguments(arguments: Sequence[str]) -> tuple[BenchPlan, Output]:
    """Return the plan and the form of its result; wrong usage ends the program with exit code 2."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    url = str(options.url).rstrip("/")
    if "://" not in url or not url.startswith(("http://", "https://")):
        parser.error(f"URL is http:// or https://, not {url!r}.")
    try:
        fields = orjson.loads(options.fields)
    except orjson.JSONDecodeError as exc:
        parser.error(f"--fields is not JSON: {exc}")
    if not isinstance(fields, dict):
        parser.error("--fields is a JSON object.")
    fields = cast("dict[str, Any]", fields)
    if options.max_output_tokens is not None:
        fields["max_output_tokens"] = options.max_output_tokens
    duration_s = options.duration
    if duration_s is None and options.requests is None:
        duration_s = _DEFAULT_DURATION_S
    plan = BenchPlan(
        url=url if url.endswith("/v1") else f"{url}/v1",
        key=options.key,
        metrics_key=options.metrics_key or options.key,
        model=options.model,
        mode=options.mode,
        clients=options.clients,
        duration_s=duration_s,
        requests=options.requests,
        input=_repeat_words(options.input, options.input_words),
        fields=fields,
        turns=options.turns,
        lines=options.lines,
        tool=options.tool,
        timeout_s=options.timeout,
    )
    return plan, Output(options.json, options.compare)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stack bench",
        description="Send load to a running stack through its public API, and print what it did.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    url = os.environ.get("OPENAI_BASE_URL") or _DEFAULT_URL
    add("url", nargs="?", default=url, metavar="URL", help=f"base URL of the API (OPENAI_BASE_URL, or {_DEFAULT_URL})")
    key = os.environ.get("OPENAI_API_KEY") or "none"
    add("--key", default=key, help="API key; OPENAI_API_KEY unless it is set")
    add("--metrics-key", help="key that reads /metrics; the API key unless it is set")
    add("--model", help="the first one that the server lists, unless it is set")
    add("--mode", choices=get_args(Mode), default="streams")
    add("--clients", type=_number(1, _MAX_CLIENTS), default=16, help="clients at work at the same time (16)")
    add("--duration", type=_seconds, help="seconds in which requests begin (10, unless --requests is set)")
    add("--requests", type=_number(1, 10**9), help="requests of all clients together")
    add("--input", default=_DEFAULT_INPUT, help="text of a request, after a number of its own")
    add("--input-words", type=_number(1, _MAX_INPUT_WORDS), help="repeat the text until it has so many words")
    add("--max-output-tokens", type=_number(1, 10**6), help="bound of each answer")
    add("--fields", default="{}", help="""JSON object: further fields of each request, such as '{"store": false}'""")
    add("--turns", type=_number(1, 10_000), default=10, help="turns of a chain (10)")
    add("--lines", type=_number(1, 50_000), default=100, help="lines of a batch (100)")
    add("--tool", help="type of a hosted tool, such as web_search or code_interpreter")
    add("--timeout", type=_seconds, default=300.0, help="seconds until a request counts as failed (300)")
    add("--json", action="store_true", help="print JSON, which --compare reads")
    add("--compare", metavar="FILE", help="JSON of an earlier run, shown next to this one")
    return parser


def _number(lowest: int, highest: int) -> Any:
    def read(text: str) -> int:
        number = int(text)
        if not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(f"{number} is not between {lowest} and {highest}.")
        return number

    read.__name__ = "number"  # argparse's messages name it
    return read


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError("a number of seconds is above 0 and at most 86400.")
    return seconds


def _repeat_words(text: str, count: int | None) -> str:
    words = text.split()
    if count is None or not words:
        return text
    return " ".join(itertools.islice(itertools.cycle(words), count))
