"""A server that gives the same answer to every request of one method."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def answering(
    get: bytes, post: bytes = b"{}", *, post_type: str = "application/json", post_delay_s: float = 0.0
) -> Generator[str]:
    """Serve these bodies; yields the URL with /v1. The first answer to a POST comes after `post_delay_s`."""
    delays = [post_delay_s]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(get, "application/json")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            time.sleep(delays.pop() if delays else 0)
            self.answer(post, post_type)

        def answer(self, body: bytes, content_type: str) -> None:
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
