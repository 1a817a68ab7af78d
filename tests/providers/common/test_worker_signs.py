"""The signs of workers: those that live renew them, however slow they are; those that have ended do not."""

import asyncio
from collections.abc import Sequence

from apis.errors import StoreUnavailable
from apis.storage.kv_store import Op
from providers.common.state.worker_signs import WorkerSign
from providers.kv_store.memory import Memory

INTERVAL_S = 0.02


class Away(Memory):
    """A store that refuses the next writes."""

    refusals = 0

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        if self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("The store is away.")
        return await super().write(ops, durable=durable)


async def test_workers_that_renew_their_signs_have_not_ended() -> None:
    """A sign that is present proves nothing: its worker may have ended since."""
    store = Away(Memory.Config())
    asking, living, ended, returning = (WorkerSign(store, INTERVAL_S, name=name) for name in "aler")
    for sign in (asking, living, ended):
        sign.start()
    await asyncio.sleep(2 * INTERVAL_S)
    await ended.close()
    assert await store.get("/worker_sign/e") is not None
    store.refusals = 2
    returning.start()
    assert await asking.list_ended(["e", "l", "never seen", "e", "r", "a"]) == ["e", "never seen", "e"]
    for sign in (asking, living, returning):
        await sign.close()


async def test_none_is_waited_for_where_none_can_have_ended() -> None:
    asking = WorkerSign(Memory(Memory.Config()), 3600)
    async with asyncio.timeout(5):
        assert await asking.list_ended([asking.name]) == []
        assert await asking.list_ended([]) == []
