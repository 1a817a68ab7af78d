"""The command `stack batch run`: a file of requests as a batch of a running stack, or of one that runs for it alone."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast, get_args

import orjson
from openai import APIConnectionError, APIStatusError, OpenAI, OpenAIError
from openai.types.batch import Batch

from apis.batches.batches import BatchEndpoint
from apis.errors import UpstreamError

_POLL_S: Final = 0.5
_BODY_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a file above which it is sent in parts, and bytes of a part."""
_BAR_WIDTH: Final = 30
_ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
_LISTENING: Final = "listening on "
_STOP_TIMEOUT_S: Final = 60


def run_batch(input_path: str, output_path: str | None, url: str, window: str, show: Callable[[str], None]) -> str:
    """Run the requests in the file on the stack at `url` and return a summary.

    Results are written to `output_path`, by default the input's name with `.output.jsonl`; failed requests to the same
    name with `.errors.jsonl`. `show` gets the progress as one line, again and again. Ctrl-C cancels the batch, and the
    results so far are written all the same. Raises UpstreamError.
    """
    source = Path(input_path)
    output = Path(output_path) if output_path else source.with_suffix(".output.jsonl")
    api_key = os.environ.get("OPENAI_API_KEY") or "none"
    try:
        endpoint = cast("Any", _read_endpoint(source))
        with OpenAI(base_url=url, api_key=api_key) as client:
            file_id = _upload(client, source)
            window_name = cast("Any", window)
            batch = client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window=window_name)
            batch = _follow(client, batch, show)
            _raise_for_faults(batch)
            files = [(batch.output_file_id, output), (batch.error_file_id, output.with_suffix(".errors.jsonl"))]
            written = [str(path) for result_id, path in files if result_id and _download(client, result_id, path)]
    except APIConnectionError as exc:
        raise UpstreamError(
            f"No server answers at {url}. Start one: stack run FILE, or name one: --config FILE"
        ) from exc
    except APIStatusError as exc:
        raise UpstreamError(f"{url} answered with {exc.status_code}: {exc.message}") from exc
    except (OpenAIError, OSError) as exc:
        raise UpstreamError(str(exc)) from exc
    return f"{batch.id} {_render(batch)}\nWrote {', '.join(written) or 'nothing'}."


@contextmanager
def serve_alone(config: str) -> Generator[str]:
    """Run the stack of a run config on a free port while the context is entered; yields its base URL. Raises
    UpstreamError if it does not start."""
    command = [sys.executable, "-m", "stack", "run", config, "--port", "0"]
    # a session of its own, so that Ctrl-C reaches this program alone, which cancels the batch first
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:  # noqa: S603 - this program itself
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(_LISTENING)), None)
            if line is None:
                raise UpstreamError(f"The stack of {config} did not start.")
            yield f"{line.removeprefix(_LISTENING).strip()}/v1"
        finally:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)


def _read_endpoint(source: Path) -> str:
    """Return the URL of the first request, which all others must have. Raises UpstreamError."""
    with source.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        endpoint = str(orjson.loads(first)["url"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        endpoint = ""
    if endpoint not in get_args(BatchEndpoint):
        endpoints = ", ".join(get_args(BatchEndpoint))
        raise UpstreamError(f"{source}: the first line has no `url` of a batch: {endpoints}.")
    return endpoint


def _upload(client: OpenAI, source: Path) -> str:
    """Upload the file, in parts if it is large; returns its id."""
    if source.stat().st_size <= _BODY_BYTES:
        return client.files.create(file=source, purpose="batch").id
    upload = client.uploads.upload_file_chunked(
        file=source, mime_type="application/jsonl", purpose="batch", part_size=_BODY_BYTES
    )
    assert upload.file is not None
    return upload.file.id


def _follow(client: OpenAI, batch: Batch, show: Callable[[str], None]) -> Batch:
    """Show the progress until the batch has ended."""
    is_cancelled = False
    while batch.status not in _ENDED:
        try:
            show(_render(batch))
            time.sleep(_POLL_S)
            batch = client.batches.retrieve(batch.id)
        except KeyboardInterrupt:
            if is_cancelled:
                raise
            is_cancelled = True
            batch = client.batches.cancel(batch.id)
    show(f"{_render(batch)}\n")
    return batch


def _render(batch: Batch) -> str:
    counts = batch.request_counts
    total, done = (counts.total, counts.completed + counts.failed) if counts else (0, 0)
    filled = _BAR_WIDTH * done // total if total else 0
    failed = f", {counts.failed} failed" if counts and counts.failed else ""
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {done}/{total} {batch.status}{failed}"


def _raise_for_faults(batch: Batch) -> None:
    errors = batch.errors.data if batch.errors and batch.errors.data else []
    if batch.status == "failed":
        faults = [f"line {error.line}: {error.message}" if error.line else str(error.message) for error in errors]
        raise UpstreamError("\n".join(["No request was executed.", *faults]))


def _download(client: OpenAI, file_id: str, path: Path) -> bool:
    with client.files.with_streaming_response.content(file_id) as content:
        content.stream_to_file(path)
    return True
