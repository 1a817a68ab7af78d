"""Per-conversation lock: its holder is the only response in progress in the conversation.

The lock is a lease that the process that generates the response renews. The lock of a background response lives longer
than such a response can take, because the worker that executes it may change. The items of a response are added to its
conversation in the same atomic write that releases the lock: of two responses that would add items one does, and no
response follows items that it has not seen.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

import orjson

from apis.errors import ConversationLocked, ConversationLost, NotFound, StackError, StoreUnavailable
from apis.storage.kv_store import Entry, KVStore, Op
from apis.storage.lease import Lease, LeaseLost, release_lease_of
from providers.common.state.change import repeat_until_true
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.conversation_items import ConversationKeys, build_append_ops, load_conversation_state

LEASE_S: Final = 15.0


class ConversationLock:
    """The lock of one response on its conversation. As a context it is renewed, and released at the end unless it was
    handed over or released before."""

    def __init__(
        self, kv: KVStore, ref: ConversationKeys, response_id: str, background_s: float, lease_s: float = LEASE_S
    ) -> None:
        """Without renewal the lock expires after `lease_s`, and after `background_s` once it was handed over to the
        worker of a background response."""
        self.ref = ref
        self._kv = kv
        self._lease = Lease(kv, _lock_key(ref), lease_s, holder=response_id)
        self._background_s = background_s
        self._end_entry: Entry | None = None
        self._is_relinquished = False
        self._exit_stack = AsyncExitStack()

    async def acquire(self) -> None:
        """Acquire the lock, also where another worker acquired it for this response. Raises ConversationLocked if
        another response holds it, NotFound if there is no such conversation."""

        async def attempt() -> bool:
            entry = (await load_conversation_state(self._kv, self.ref)).lock_entry
            if entry is None:
                versions = await self._lease.acquire()
            elif self._lease.is_named_in(entry):
                versions = await self._lease.acquire(expect=entry.version, ttl_s=self._background_s)
            else:
                raise ConversationLocked(self.ref.id)
            if versions is None:
                return False
            # an earlier writer may have moved the end since the state was read; from now on no other can
            self._end_entry = await self._kv.get(self.ref.record_key("conversation_end"))
            if self._end_entry is None:
                await self.release()
            return self._end_entry is not None

        await repeat_until_true(attempt)

    async def is_held(self) -> bool:
        """Return True if the response, in any worker, holds the lock of a conversation that still exists."""
        entry, end_entry = await self._kv.get_many([self._lease.key, self.ref.record_key("conversation_end")])
        return entry is not None and self._lease.is_named_in(entry) and end_entry is not None

    async def release(self) -> None:
        """Release the lock if it is still held. During an outage of the store it expires instead."""
        self._is_relinquished = True
        with suppress(StackError, LeaseLost):
            await self._lease.release()

    @asynccontextmanager
    async def hand_over(self) -> AsyncGenerator[Sequence[Op]]:
        """Yield the operation that keeps the lock for the worker of a background response: to be written with the run
        before the context ends. Its condition does not hold if the lock is lost."""
        async with self._lease.hand_over(self._background_s) as op:
            yield [op]
        self._is_relinquished = True

    async def build_append_and_release_ops(
        self, input_json: bytes, output_json: bytes, tool_results: Mapping[str, ToolResultRecord]
    ) -> list[Op]:
        """Return the operations that add the items to the conversation and release the lock: to be written with the
        response. Their conditions do not hold if the lock or the conversation is gone. `input_json` and `output_json`
        are JSON arrays."""
        self._is_relinquished = True
        release_op = await self._lease.prepare_release()
        items = [*orjson.loads(input_json), *orjson.loads(output_json)]
        return [release_op, *build_append_ops(self.ref, self._end_entry, items, tool_results)[1]]

    async def lost_error(self) -> StackError:
        """Return the error of a response whose final write did not hold: the conversation was deleted, or another
        response has locked it since."""
        with suppress(StoreUnavailable):
            try:
                await load_conversation_state(self._kv, self.ref)
            except NotFound:
                return NotFound(
                    f"The conversation '{self.ref.id}' was deleted before the response ended.",
                    param="conversation",
                    code="conversation_deleted",
                )
        return ConversationLost(self.ref.id)

    async def __aenter__(self) -> "ConversationLock":
        await self._exit_stack.enter_async_context(self._lease.renew_in_background())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit_stack.aclose()
        if not self._is_relinquished:
            await self.release()


async def release_lock(kv: KVStore, tenant: str, conversation_id: str, response_id: str) -> None:
    """Release the lock of a response that adds nothing, whichever worker acquired it."""
    with suppress(StackError):
        await release_lease_of(kv, _lock_key(ConversationKeys(tenant, conversation_id)), response_id)


def _lock_key(ref: ConversationKeys) -> str:
    return ref.record_key("conversation_floor")
