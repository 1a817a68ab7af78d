"""When the parts of an event stream leave."""

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from apis.sink import put_all
from providers.common.fair_turns import TenantTurn, turn_of
from stack.http.peer import Peer, peer_state
from stack.http.request_record import RequestRecord
from stack.http.streams import EventStream, StreamMonitor

CREATED = SimpleNamespace(type="response.created", response=None)
OUTPUT = SimpleNamespace(type="response.output_text.delta")
END = SimpleNamespace(type="response.completed", response=None)


class Connection(Peer):
    """Records what is sent by ASGI, which may be held back, and what is written at once."""

    def __init__(self, *, is_ready: bool) -> None:
        self.turn = turn_of("")
        self.cover_message = self.write_text = bool
        self.calls: list[str] = []
        self._is_ready = is_ready

    async def send(self, message: Message) -> None:
        self.calls.append("head" if message["type"].endswith("start") else f"held {message['body'].decode().strip()}")

    def body_writer(self) -> Callable[[bytes], bool]:
        def write(body: bytes) -> bool:
            self.calls.append(f"at once {body.decode()}")
            return self._is_ready

        return write

    def admit(self, turn: TenantTurn) -> None: ...

    def watch(self, on_disconnect: Callable[[], None]) -> None: ...

    def stop_watching(self) -> None: ...

    def abort(self) -> None: ...


async def receive() -> Message:
    raise NotImplementedError


@pytest.mark.parametrize("is_ready", [True, False])
async def test_the_first_output_leaves_before_the_next_batch_is_made(*, is_ready: bool) -> None:
    connection = Connection(is_ready=is_ready)

    async def batches() -> AsyncGenerator[Sequence[Any]]:
        yield [CREATED]
        yield [OUTPUT]
        connection.calls.append("the response is stored")
        yield [END]

    stream = EventStream(
        partial(put_all, batches()),
        lambda batch: batch[0].type.encode(),
        StreamMonitor(60),
        RequestRecord("req_1", "POST", "/responses"),
        creates_response=True,
    )
    await stream({"type": "http", "state": peer_state({}, connection)}, receive, connection.send)
    assert connection.calls == [
        "head",
        "held response.created",
        "at once response.output_text.delta",
        *(["held "] if not is_ready else []),  # ASGI's `send` waits until the client is ready
        "the response is stored",
        "held response.completeddata: [DONE]",
    ]
