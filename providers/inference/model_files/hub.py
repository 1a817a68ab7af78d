"""Files of the Hugging Face hub, in the cache that all tools of the hub share. See hub_child.py for the other side.

The work is done in a child process: it can be stopped at any time, and huggingface_hub is not imported by the server.
"""

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from apis.errors import ConfigError
from apis.imports import install_command
from providers.common.processes.child import build_compute_environment, build_environment
from providers.common.processes.process import PIPE, start_process
from providers.inference.model_files.catalogue import HubFile
from providers.inference.model_files.packages import models_dir

_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_HUB_VARIABLES: Final = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HUGGINGFACE_HUB_CACHE"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC", "NO_COLOR", "TERM", "COLUMNS"),
    *_PROXIES,
    *(name.lower() for name in _PROXIES),
)
"""Variables of the child that works on the hub, and those that begin with `HF_`. Its token is the one secret that a
child of a model has."""
_CHILD_SCRIPT: Final = Path(__file__).with_name("hub_child.py")
_LIST_TIMEOUT_S: Final = 120.0
_MAX_REPLY_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CachedFile:
    """GGUF file in the hub's cache, and the bytes that it takes there."""

    repository: str
    file: str
    size_bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class HubCache:
    """The cache that tools of the hub share: its folder and its GGUF files."""

    folder: Path
    files: Sequence[CachedFile]


async def fetch_hub_file(
    file: HubFile, timeout_s: float, limit_bytes: int | None = None, on_progress: Callable[[int], None] | None = None
) -> tuple[Path, bool]:
    """Return the file's path in the cache, and true if it was downloaded now. A larger file than `limit_bytes` is not.

    A file that is there is used without a network. A download is verified against the SHA-256 of the catalogue and of
    the hub, continues where an earlier one ended, and is shown on stderr, or `on_progress` gets its bytes. Raises
    ConfigError with the remedy.
    """
    marks = models_dir() / "verified"
    try:
        async with asyncio.timeout(timeout_s):
            fetched = await _run_child(
                on_progress=on_progress,
                action="fetch",
                repository=file.repository,
                file=file.file,
                revision=file.revision,
                sha256=file.sha256,
                marks=str(marks),
                limit_bytes=limit_bytes,
            )
    except TimeoutError as exc:
        raise ConfigError(
            f"{file.repository}/{file.file} was not there within {timeout_s:g} s (fetch_timeout_s). What was "
            "downloaded stays: the next start continues there."
        ) from exc
    return Path(fetched["path"]), fetched["downloaded"]


async def list_hub_cache() -> HubCache:
    """Return the cache's folder and its GGUF files, also those of other tools."""
    async with asyncio.timeout(_LIST_TIMEOUT_S):
        listed = await _run_child(action="list")
    return HubCache(Path(listed["folder"]), [CachedFile(**row) for row in listed["files"]])


async def remove_cached_file(repository: str, file: str) -> int:
    """Remove the file from the cache; return the bytes that became free, 0 if it was not there."""
    async with asyncio.timeout(_LIST_TIMEOUT_S):
        return await _run_child(action="remove", repository=repository, file=file)


async def _run_child(*, on_progress: Callable[[int], None] | None = None, **settings: Any) -> Any:
    if await asyncio.to_thread(importlib.util.find_spec, "huggingface_hub") is None:
        raise ConfigError(f"Models of the Hugging Face hub need huggingface_hub: {install_command('local')}.")
    # -P: the child's own folder must not shadow its imports.
    process = await start_process(
        (sys.executable, "-P", str(_CHILD_SCRIPT)),
        stdin=PIPE,
        stdout=PIPE,
        limit=_MAX_REPLY_BYTES,
        env={**build_compute_environment(), **build_environment(_HUB_VARIABLES, ("HF_",))},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({**settings, "reports": on_progress is not None}).encode() + b"\n")
        reply: dict[str, Any] = json.loads(await process.stdout.readline() or b"{}")
        while on_progress is not None and "done_bytes" in reply:
            on_progress(int(reply["done_bytes"]))
            reply = json.loads(await process.stdout.readline() or b"{}")
    except (OSError, ValueError) as exc:
        raise ConfigError(f"The process that works on the Hugging Face cache failed: {exc}") from exc
    finally:
        await process.end()
    if "result" not in reply:
        raise ConfigError(reply.get("error", "The process that works on the Hugging Face cache ended; see above."))
    return reply["result"]
