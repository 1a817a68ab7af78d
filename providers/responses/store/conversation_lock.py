"""The floor of a conversation: who has it makes the one response that is being made in it.

It is a record with a short life, taken where there is none and renewed by the process that makes the response. The
floor of a background response outlives all that such a response may take, because whoever makes it may change. What a
response adds to its conversation is written together with it, and only if the floor is still its own then: of two
that would, one does, and no answer follows on what it has not seen.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from typing import Final, TypeVar

import orjson

from apis.errors import ConversationLocked, StackError
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.conversation_items import ConversationKeys, build_append_ops, load_conversation_state

BatchT = TypeVar("BatchT")
LEASE_S: Final = 15.0


class ConversationLock:
    """One response's right to its conversation. As a context it is renewed, and given up at its end if it has not
    passed on by then."""

    def __init__(
        self, kv: KVStore, ref: ConversationKeys, response_id: str, background_s: float, lease_s: float = LEASE_S
    ) -> None:
        """Without renewal it lives for `lease_s`, and for `background_s` when it is handed over to whoever makes a
        background response."""
        self.ref = ref
        self._kv = kv
        self._key = ref.record_key("conversation_floor")
        self._holder = response_id.encode()
        self._background_s = background_s
        self._lease_s = lease_s
        self._version: int | None = ABSENT
        self._end_entry: Entry | None = None
        self._is_relinquished = False
        self._write_lock = asyncio.Lock()
        self._renewal_task: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        """Raises ConversationLocked where another response has it, NotFound where there is no such conversation."""
        while True:
            found = await load_conversation_state(self._kv, self.ref)
            if found.lock_entry is not None and found.lock_entry.value != self._holder:
                raise ConversationLocked(self.ref.id)
            life_s = self._background_s if found.lock_entry is not None else self._lease_s
            expect = found.lock_entry.version if found.lock_entry is not None else ABSENT
            versions = await self._kv.write([Put(self._key, self._holder, life_s, expect)], durable=False)
            if versions is None:
                continue
            self._version = versions[0]
            # whoever added items before has moved the end, and from now on nobody can
            self._end_entry = await self._kv.get(self.ref.record_key("conversation_end"))
            if self._end_entry is not None:
                return
            await self.release()

    async def is_held(self) -> bool:
        """Whether it is still this response's."""
        held, end = await self._kv.get_many([self._key, self.ref.record_key("conversation_end")])
        return held is not None and held.value == self._holder and end is not None

    async def release(self) -> None:
        """Give it up, if it is still this response's. Where the store cannot be reached, it passes with its time."""
        async with self._write_lock:
            self._is_relinquished = True
            with suppress(StackError):
                held = await self._kv.get(self._key)
                if held is not None and held.value == self._holder:
                    await self._kv.write([Delete(self._key, held.version)], durable=False)

    @asynccontextmanager
    async def hand_over(self) -> AsyncGenerator[Sequence[Op]]:
        """What keeps it for whoever makes the response in the background: to be written, with the response's run,
        before the context ends. It does not hold when the floor is gone."""
        async with self._write_lock:
            if self._version is None:
                await self._reload_version()
            yield [Put(self._key, self._holder, self._background_s, self._version)]
            self._is_relinquished = True
            self._version = None

    async def build_append_and_release_ops(
        self, input_json: bytes, output_json: bytes, tool_results: Mapping[str, ToolResultRecord]
    ) -> list[Op]:
        """What adds the items to the conversation and gives up the floor: to be written with the response. It does not
        hold when the floor or the conversation is gone. `given` and `made` are JSON arrays."""
        async with self._write_lock:
            self._is_relinquished = True
            if self._version is None:
                await self._reload_version()
        _, ops = build_append_ops(
            self.ref, self._end_entry, [*orjson.loads(input_json), *orjson.loads(output_json)], tool_results
        )
        return [Delete(self._key, self._version), *ops]

    def lost_error(self) -> StackError:
        """Why a response failed whose end could not be written."""
        return StackError(
            f"The conversation '{self.ref.id}' was deleted, or this server was cut off from it for too long, before "
            "the response ended. Nothing was added to it.",
            code="conversation_lost",
        )

    async def __aenter__(self) -> "ConversationLock":
        self._renewal_task = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._renewal_task is not None:
            async with self._write_lock:  # so that no renewal is left half done
                self._renewal_task.cancel()
            await asyncio.wait({self._renewal_task})
        if not self._is_relinquished:
            await self.release()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            async with self._write_lock:
                if self._is_relinquished:
                    return
                try:
                    if self._version is None:
                        await self._reload_version()
                    versions = await self._kv.write(
                        [Put(self._key, self._holder, self._lease_s, self._version)], durable=False
                    )
                except StackError:
                    self._version = None  # it may have been renewed or not
                    continue
                if versions is None:
                    return  # it is lost: what the response would write at its end will not hold
                self._version = versions[0]

    async def _reload_version(self) -> None:
        """The version, after a renewal of which nobody knows whether it was made."""
        held = await self._kv.get(self._key)
        self._version = held.version if held is not None and held.value == self._holder else -1


async def release_lock(kv: KVStore, tenant: str, conversation_id: str, response_id: str) -> None:
    """Give up the floor of a response that adds nothing, whoever took it."""
    await ConversationLock(kv, ConversationKeys(tenant, conversation_id), response_id, 0).release()


def hand_over_lock(lock: ConversationLock | None) -> AbstractAsyncContextManager[Sequence[Op]]:
    """As a floor does it, if there is one."""
    return nullcontext(()) if lock is None else lock.hand_over()


async def stream_with_lock(lock: ConversationLock, batches: AsyncGenerator[BatchT]) -> AsyncGenerator[BatchT]:
    """The same batches, while the floor is renewed."""
    async with lock, aclosing(batches):
        async for some in batches:
            yield some
