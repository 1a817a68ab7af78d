"""How a connection waits."""

import asyncio

from stack.serving.flow import LazyEvent


async def test_an_event_wakes_all_that_wait_and_can_be_waited_for_again() -> None:
    event = LazyEvent(is_set=False)
    for _ in range(2):
        waiters = [asyncio.create_task(event.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        waiters.pop().cancel()
        event.set()
        assert await asyncio.gather(*waiters) == [True, True]
        assert event.is_set()
        assert await event.wait()
        event.clear()
        assert not event.is_set()


async def test_an_event_that_is_set_before_anybody_waits_is_not_waited_for() -> None:
    event = LazyEvent(is_set=False)
    event.set()
    assert await asyncio.wait_for(event.wait(), 1)
