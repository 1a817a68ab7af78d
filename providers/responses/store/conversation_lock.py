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
from providers.responses.events.tool_result import Told
from providers.responses.store.conversation_items import Ref, adding, find

Batch = TypeVar("Batch")
LEASE_S: Final = 15.0


class Floor:
    """One response's right to its conversation. As a context it is renewed, and given up at its end if it has not
    passed on by then."""

    def __init__(self, kv: KVStore, ref: Ref, response_id: str, background_s: float, lease_s: float = LEASE_S) -> None:
        """Without renewal it lives for `lease_s`, and for `background_s` when it is handed over to whoever makes a
        background response."""
        self.ref = ref
        self._kv = kv
        self._key = ref.key("conversation_floor")
        self._holder = response_id.encode()
        self._background_s = background_s
        self._lease_s = lease_s
        self._version: int | None = ABSENT
        self._end: Entry | None = None
        self._over = False
        self._writing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def take(self) -> None:
        """Raises ConversationLocked where another response has it, NotFound where there is no such conversation."""
        while True:
            found = await find(self._kv, self.ref)
            if found.floor is not None and found.floor.value != self._holder:
                raise ConversationLocked(self.ref.id)
            life_s = self._background_s if found.floor is not None else self._lease_s
            expect = found.floor.version if found.floor is not None else ABSENT
            versions = await self._kv.write([Put(self._key, self._holder, life_s, expect)], durable=False)
            if versions is None:
                continue
            self._version = versions[0]
            # whoever added items before has moved the end, and from now on nobody can
            self._end = await self._kv.get(self.ref.key("conversation_end"))
            if self._end is not None:
                return
            await self.release()

    async def holds(self) -> bool:
        """Whether it is still this response's."""
        held, end = await self._kv.get_many([self._key, self.ref.key("conversation_end")])
        return held is not None and held.value == self._holder and end is not None

    async def release(self) -> None:
        """Give it up, if it is still this response's. Where the store cannot be reached, it passes with its time."""
        async with self._writing:
            self._over = True
            with suppress(StackError):
                held = await self._kv.get(self._key)
                if held is not None and held.value == self._holder:
                    await self._kv.write([Delete(self._key, held.version)], durable=False)

    @asynccontextmanager
    async def handing_over(self) -> AsyncGenerator[Sequence[Op]]:
        """What keeps it for whoever makes the response in the background: to be written, with the response's run,
        before the context ends. It does not hold when the floor is gone."""
        async with self._writing:
            if self._version is None:
                await self._look()
            yield [Put(self._key, self._holder, self._background_s, self._version)]
            self._over = True
            self._version = None

    async def ending(self, given: bytes, made: bytes, told: Mapping[str, Told]) -> list[Op]:
        """What adds the items to the conversation and gives up the floor: to be written with the response. It does not
        hold when the floor or the conversation is gone. `given` and `made` are JSON arrays."""
        async with self._writing:
            self._over = True
            if self._version is None:
                await self._look()
        _, ops = adding(self.ref, self._end, [*orjson.loads(given), *orjson.loads(made)], told)
        return [Delete(self._key, self._version), *ops]

    def lost(self) -> StackError:
        """Why a response failed whose end could not be written."""
        return StackError(
            f"The conversation '{self.ref.id}' was deleted, or this server was cut off from it for too long, before "
            "the response ended. Nothing was added to it.",
            code="conversation_lost",
        )

    async def __aenter__(self) -> "Floor":
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._renewing is not None:
            async with self._writing:  # so that no renewal is left half done
                self._renewing.cancel()
            await asyncio.wait({self._renewing})
        if not self._over:
            await self.release()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            async with self._writing:
                if self._over:
                    return
                try:
                    if self._version is None:
                        await self._look()
                    versions = await self._kv.write(
                        [Put(self._key, self._holder, self._lease_s, self._version)], durable=False
                    )
                except StackError:
                    self._version = None  # it may have been renewed or not
                    continue
                if versions is None:
                    return  # it is lost: what the response would write at its end will not hold
                self._version = versions[0]

    async def _look(self) -> None:
        """The version, after a renewal of which nobody knows whether it was made."""
        held = await self._kv.get(self._key)
        self._version = held.version if held is not None and held.value == self._holder else -1


async def release_floor(kv: KVStore, tenant: str, conversation_id: str, response_id: str) -> None:
    """Give up the floor of a response that adds nothing, whoever took it."""
    await Floor(kv, Ref(tenant, conversation_id), response_id, 0).release()


def handing_over(floor: Floor | None) -> AbstractAsyncContextManager[Sequence[Op]]:
    """As a floor does it, if there is one."""
    return nullcontext(()) if floor is None else floor.handing_over()


async def with_floor(floor: Floor, batches: AsyncGenerator[Batch]) -> AsyncGenerator[Batch]:
    """The same batches, while the floor is renewed."""
    async with floor, aclosing(batches):
        async for some in batches:
            yield some
