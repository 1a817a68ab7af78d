"""A History over a store that counts its calls, and short ways to fill and to read it."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from apis.deltas import Finish, TextDelta, Usage
from apis.responses import CreateResponse
from apis.storage.kv_store import Entry, Op
from providers.kv_store.memory import Memory
from providers.responses.context.messages import ItemReader
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_object import begin_response, end_response
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.run.turn import TurnStream
from providers.responses.store.history import History, LoadedHistory
from providers.responses.store.history_cache import LoadAllowance
from providers.responses.store.item_lookup import FoundItem
from providers.responses.store.turn_writer import FinishedResponse
from providers.responses.tools.offered import OfferedTools

DAY_S = 86_400.0
TENANT = "t"
real_time = time.time


CACHES = pytest.mark.parametrize("cache_bytes", [0, 10_000_000], ids=["nothing cached", "cached"])


class Counting(Memory):
    """A store in memory that counts its calls, and whose clock a test can move."""

    def __init__(self) -> None:
        super().__init__(Memory.Config())
        self.calls = 0
        self.dice: random.Random | None = None
        self.past_s = 0.0
        self.now = lambda: real_time() + self.past_s

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        await self.count_call()
        return await super().get_many(keys)

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        await self.count_call()
        return await super().write(ops, durable=durable)

    async def scan(
        self,
        prefix: str,
        *,
        after: str = "",
        before: str = "",
        limit: int = 1000,
        reverse: bool = False,
        max_bytes: int | None = None,
    ) -> list[tuple[str, Entry]]:
        await self.count_call()
        return await super().scan(prefix, after=after, before=before, limit=limit, reverse=reverse, max_bytes=max_bytes)

    async def count_call(self) -> None:
        """Count a call, which takes some turns of the loop where there are dice."""
        self.calls += 1
        for _ in range(self.dice.randrange(8) if self.dice else 0):
            await asyncio.sleep(0)

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of what is stored, without the ends of lines, which name an id and expire."""
        keys = [key for key, _ in await Memory.scan(self, prefix, limit=100_000)]
        return [key for key in keys if not key.startswith(f"{TENANT}/line/")]


class Kept:
    """A history, and short ways to fill and to read it."""

    def __init__(self, *, retention_s: float = 30 * DAY_S, max_turns: int = 1000, cache_bytes: int = 0) -> None:
        self.store = Counting()
        self.history = History(self.store, retention_s=retention_s, max_turns=max_turns, cache_bytes=cache_bytes)

    async def say(
        self, text: str, after: str | None = None, *, tenant: str = TENANT, item_id: str | None = None
    ) -> str:
        """One turn: the user says `text`, the model answers TEXT. Returns the response's id."""
        past = await self.history.load_history(after, tenant=tenant) if after else LoadedHistory()
        return await self.save(text, past, tenant=tenant, item_id=item_id)

    async def save(
        self,
        text: str,
        past: LoadedHistory,
        *,
        tenant: str = TENANT,
        item_id: str | None = None,
        previous_id: str | None = None,
        ids: ResponseIds | None = None,
        background: bool = False,
    ) -> str:
        ids = ids or ResponseIds()
        output = ResponseOutput(ids)
        request = CreateResponse.model_validate(
            {"model": "m", "input": text, "previous_response_id": previous_id, "background": background}
        )
        TurnStream(output, OfferedTools(request)).feed([TextDelta(text.upper()), Finish("stop", Usage())])
        begun = begin_response(request, ids.response_id, created_at=5)
        final = end_response(begun, "completed", output.finished_items(), Usage(1, 1))
        input_items = [{"type": "message", "role": "user", "content": text, "id": item_id or ids.new_item_id("msg")}]
        results = {output.finished_items()[0].id or "": ToolResultRecord("c", "f", "{}", f"told {text}")}
        await self.history.save(
            FinishedResponse(final, orjson.dumps(input_items), results), tenant=tenant, history=past
        )
        return ids.response_id

    async def save_items(self, items: Sequence[dict[str, Any]]) -> None:
        """Store one turn with these input items, and no output."""
        request = CreateResponse.model_validate({"model": "m", "input": "x"})
        final = end_response(begin_response(request, ResponseIds().response_id, created_at=5), "completed", (), Usage())
        finished = FinishedResponse(final, orjson.dumps(items), {})
        await self.history.save(finished, tenant=TENANT, history=LoadedHistory())

    async def find(self, item_id: str, *, tenant: str = TENANT) -> FoundItem | None:
        """One item by its id."""
        params = {item_id: "input[0].id"}
        items = await self.history.find_items(params, tenant=tenant, allowance=LoadAllowance(1_000_000))
        return items.get(item_id)

    async def said(self, response_id: str, *, tenant: str = TENANT) -> str:
        """All that a request after `response_id` would stand on, in one line."""
        return read_messages(await self.history.load_history(response_id, tenant=tenant))

    def other_process(self) -> History:
        """A history of the same store that has cached nothing."""
        return History(self.store, retention_s=self.history.retention_s, max_turns=1000, cache_bytes=0)


def read_messages(past: LoadedHistory) -> str:
    """Return the texts of a history in one line."""
    texts = [message.content for message in ItemReader({}).read_all(past.items)]
    return " ".join(text if isinstance(text, str) else text[0].text for text in texts)  # type: ignore[union-attr]  # text only


async def days_later(stored: Kept, days: float, patch: pytest.MonkeyPatch) -> None:
    stored.store.past_s = days * DAY_S
    patch.setattr("providers.responses.store.history.time.time", stored.store.now)
