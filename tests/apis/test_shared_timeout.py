"""SharedTimeout: each timeout expires once, at its own time, unless it is cancelled."""

import asyncio
from functools import partial

from apis.shared_timeout import SharedTimeout


async def test_each_timeout_expires_at_its_own_time_and_in_order() -> None:
    timeout, loop = SharedTimeout(0.05), asyncio.get_running_loop()
    started: list[float] = []
    expired: list[tuple[int, float]] = []

    def expire(number: int) -> None:
        expired.append((number, loop.time()))

    for number in range(3):
        started.append(loop.time())
        timeout.start(partial(expire, number))
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert [number for number, _ in expired] == [0, 1, 2]
    for number, at in expired:
        assert at - started[number] >= 0.05 - 0.001


async def test_a_cancelled_timeout_does_not_expire_and_the_next_one_does() -> None:
    timeout = SharedTimeout(0.02)
    expired: list[str] = []
    cancelled, lasting, later = (partial(expired.append, name) for name in ("cancelled", "kept", "later"))
    timeout.start(cancelled)
    timeout.start(lasting)
    timeout.cancel(cancelled)
    await asyncio.sleep(0.06)
    assert expired == ["kept"]
    timeout.cancel(lasting)  # it has expired: nothing happens
    timeout.start(later)  # the timer had ended with the last timeout
    await asyncio.sleep(0.06)
    assert expired == ["kept", "later"]


async def test_one_that_raises_does_not_stop_the_others() -> None:
    timeout = SharedTimeout(0.01)
    expired: list[str] = []
    problems: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context["exception"]))

    def fail() -> None:
        raise ValueError

    timeout.start(fail)
    timeout.start(partial(expired.append, "second"))
    await asyncio.sleep(0.04)
    assert expired == ["second"]
    assert [type(problem) for problem in problems] == [ValueError]
