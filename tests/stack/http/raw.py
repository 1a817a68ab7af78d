"""HTTP by hand, for what no client library would send, and what every error answer must look like."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

BOUND_S = 30.0
JSON = "application/json"


KEYS: Any = [{"key": "sk-one", "tenant": "one"}, {"key": "sk-two", "tenant": "two"}]
HELLO: dict[str, Any] = {"model": "scripted", "input": "hi"}


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


@dataclass(frozen=True)
class Answer:
    """An HTTP answer. Header names are in lower case; a chunked body has been put together."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@asynccontextmanager
async def connection(url: str) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A TCP connection to the server at `url`, everything on it bounded in time."""
    at = urlsplit(url)
    async with asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def send(url: str, request: bytes) -> Answer:
    """Send these bytes, and read until the server closes."""
    async with connection(url) as (reader, writer):
        writer.write(request)
        return parse(await reader.read())


async def ask(
    url: str,
    body: bytes | Mapping[str, Any] | None = None,
    *,
    method: str = "POST",
    path: str = "/v1/responses",
    headers: Sequence[tuple[str, str]] = (),
    kind: str | None = JSON,
) -> Answer:
    """One request on a connection of its own; header values are sent as Latin-1."""
    return await send(url, request(url, body, method=method, path=path, headers=headers, kind=kind))


def request(
    url: str,
    body: bytes | Mapping[str, Any] | None = None,
    *,
    method: str = "POST",
    path: str = "/v1/responses",
    headers: Sequence[tuple[str, str]] = (),
    kind: str | None = JSON,
) -> bytes:
    """The bytes of a request after whose answer the connection is closed."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = [*headers]
    input_items = {name.lower() for name, _ in headers}
    if "host" not in input_items:
        fields.append(("host", urlsplit(url).netloc))
    if "content-length" not in input_items and "transfer-encoding" not in input_items:
        fields.append(("content-length", str(len(data))))
    if kind is not None:
        fields.append(("content-type", kind))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields), "connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + data


def parse(raw: bytes) -> Answer:
    """The bytes of an answer."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _dechunk(body)
    return Answer(int(status.split()[1]), headers, body)


def _dechunk(body: bytes) -> bytes:
    whole = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole += body[:length]
        body = body[length + 2 :]
    return bytes(whole)


def check_error(answer: Answer, status: int) -> dict[str, Any]:
    """Raise AssertionError unless `answer` is an error as OpenAI's API shows them; returns its four fields."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == JSON
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.json.keys() == {"error"}
    error: dict[str, Any] = answer.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= 1024
    for leak in ("Traceback", "pydantic", 'File "', "<html", 'detail":'):
        assert leak not in error["message"]
    return error


def error_code(answer: Answer, status: int) -> str | None:
    """The code of an error in OpenAI's form, or in Anthropic's on the routes of the Messages API."""
    if answer.json.get("type") != "error":
        return check_error(answer, status)["code"]
    assert answer.status == status, answer
    details: dict[str, str] | None = answer.json["error"]["details"]
    return details.get("error_code") if details else None
