"""A server on loopback that speaks the Hugging Face hub's protocol, with the failures of a real one.

HEAD and GET of /OWNER/NAME/resolve/REVISION/FILE redirect to a content network of its own (another port), which honours
Range. It runs in a thread, because downloads run in other processes.
"""

import hashlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote

import pytest

COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """`files` by repository and path. What is set besides them breaks the next answers."""

    files: dict[tuple[str, str], bytes] = field(default_factory=dict[tuple[str, str], bytes])
    token: str = ""
    """Requests to the hub need it, if it is set."""
    gated: set[str] = field(default_factory=set[str])
    stated_sizes: dict[str, int] = field(default_factory=dict[str, int])
    stated_digests: dict[str, str] = field(default_factory=dict[str, str])
    breaks: list[int] = field(default_factory=list[int])
    """Bytes of the body after which each next download breaks off."""
    expired: int = 0
    """Downloads that are answered with 403, as a signed URL that has expired."""
    expires_after_break: bool = False
    stalls_after: int = 0
    """Bytes of the body after which the next download stands still until `resumed` is set."""
    resumed: threading.Event = field(default_factory=threading.Event)
    has_ranges: bool = True
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list[tuple[str, str, dict[str, str]]])
    url: str = ""
    network_url: str = ""

    def ranges(self) -> list[str]:
        """Return the Range of each download, empty for a whole file."""
        return [headers.get("range", "") for _, path, headers in self.requests if path.startswith("/blob/")]

    def put(self, repository: str, file: str, content: bytes) -> str:
        """Publish the file; return its SHA-256."""
        self.files[repository, file] = content
        return hashlib.sha256(content).hexdigest()


@contextmanager
def running_hub() -> Generator[HubServer]:
    """Run a hub and its content network until the block ends."""
    hub = HubServer()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) for _ in range(2)]
    hub.url, hub.network_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def hub_environment(hub: HubServer, folder: str) -> Generator[None]:
    """Point the hub's environment variables at the server and at a cache of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", f"{folder}/huggingface")
        patch.setenv("XDG_CACHE_HOME", f"{folder}/cache")
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the standard library
            """Log nothing."""

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            hub.requests.append((self.command, self.path, headers))
            parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
            if parts[0] == "blob":
                self._send_blob((f"{parts[1]}/{parts[2]}", "/".join(parts[3:])), headers, with_body=with_body)
            elif hub.token and headers.get("authorization") != f"Bearer {hub.token}":
                self._send(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
            else:
                self._send_resolved(parts)

        def _send_resolved(self, parts: list[str]) -> None:
            repository, file = "/".join(parts[:2]), "/".join(parts[4:])
            if repository not in {name for name, _ in hub.files}:
                self._send(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            elif repository in hub.gated:
                self._send(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            elif parts[3] not in ("main", COMMIT):
                self._send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            elif (repository, file) not in hub.files:
                missing = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
                self._send(404, {**missing, "X-Repo-Commit": COMMIT})
            else:
                content = hub.files[repository, file]
                digest = hub.stated_digests.get(file, hashlib.sha256(content).hexdigest())
                stated = {
                    "X-Repo-Commit": COMMIT,
                    "X-Linked-Etag": f'"{digest}"',
                    "X-Linked-Size": str(hub.stated_sizes.get(file, len(content))),
                    "Location": f"{hub.network_url}/blob/{repository}/{file}",
                }
                self._send(302, stated)

        def _send_blob(self, key: tuple[str, str], headers: dict[str, str], *, with_body: bool) -> None:
            if hub.expired and with_body:
                hub.expired -= 1
                self._send(403, {})
                return
            content, start = hub.files[key], 0
            if hub.has_ranges and "range" in headers:
                start = int(headers["range"].removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if not with_body:
                return
            if hub.stalls_after:
                self.wfile.write(content[start : start + hub.stalls_after])
                hub.stalls_after = 0
                hub.resumed.wait(30)
                self.close_connection = True
            elif hub.breaks:
                self.wfile.write(content[start : start + hub.breaks.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                hub.expired = 1000 if hub.expires_after_break else hub.expired
            else:
                self.wfile.write(content[start:])

        def _send(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
