"""Turns of the event loop by tenant: what is done at once, what waits, and in which order."""

import asyncio
from functools import partial

import pytest

from providers.common.fair_turns import CURRENT_TURN, REQUEST_WORK, TURN_WORK, current_turn, turn_of


async def iterate(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_tenants_with_queued_work_are_served_in_rotation() -> None:
    """Neighbours: of a tenant with much work one piece is done in each iteration of the event loop."""
    done = list[str]()
    for number in range(5):
        turn_of("loud").queue(partial(done.append, f"loud {number}"), TURN_WORK)
    turn_of("quiet").queue(partial(done.append, "quiet"), 1)
    await iterate(1)
    assert done == ["loud 0", "quiet"]
    await iterate(1)
    assert done == ["loud 0", "quiet", "loud 1"]
    await iterate(10)
    assert done[2:] == ["loud 1", "loud 2", "loud 3", "loud 4"]


async def test_small_pieces_of_one_tenant_are_done_in_one_turn() -> None:
    done = list[int]()
    for number in range(100):
        turn_of("a").queue(partial(done.append, number), TURN_WORK // 8)
    await iterate(1)
    assert done == list(range(8))


async def test_many_tenants_share_an_iteration() -> None:
    """Neighbours: the more tenants have queued work, the longer each waits, and no iteration grows."""
    done = list[str]()
    for name in "abcdefghij":
        for _ in range(2):
            turn_of(name).queue(partial(done.append, name), TURN_WORK)
    await iterate(1)
    assert done == ["a", "b", "c", "d"]
    await iterate(2)
    assert done[4:] == ["e", "f", "g", "h", "i", "j", "a", "b"]


async def test_a_request_waits_only_while_its_tenant_has_spent_its_turn() -> None:
    turn, waits = turn_of("a"), list[asyncio.Task[None]]()
    for _ in range(20):
        waits.append(asyncio.create_task(turn.wait(REQUEST_WORK)))
    await iterate(1)
    at_once = [wait.done() for wait in waits]
    assert at_once == [True] * 4 + [False] * 16
    other = asyncio.create_task(turn_of("b").wait(REQUEST_WORK))
    waits[5].cancel()
    await iterate(1)
    assert other.done()
    async with asyncio.timeout(5):
        await asyncio.wait(waits)
    assert [wait.cancelled() for wait in waits] == [number == 5 for number in range(20)]


async def test_work_within_the_turns_of_many_iterations_is_never_queued() -> None:
    """Neighbours: a tenant does not wait for work of earlier iterations, however much it was."""
    turn = turn_of("a")
    taken = list[bool]()
    for _ in range(100):
        await iterate(1)
        taken.append(turn.takes(TURN_WORK // 2))
    assert all(taken)


@pytest.mark.parametrize("before", [0, TURN_WORK // 2, TURN_WORK, 2 * TURN_WORK])
async def test_an_iteration_takes_the_work_of_one_turn(before: int) -> None:
    """Neighbours: this holds also where queued work of the tenant was done in it, after any earlier work."""
    turn, pieces = turn_of("a"), list[int]()
    turn.takes(before)
    await iterate(2)
    assert sum(turn.takes(TURN_WORK // 8) for _ in range(100)) in (4, 8)
    await iterate(2)
    turn.queue(partial(pieces.append, 1), TURN_WORK // 2)
    assert not turn.takes()
    await iterate(1)
    assert pieces == [1]
    assert sum(turn.takes(TURN_WORK // 8) for _ in range(100)) == 4


async def test_a_piece_that_raises_delays_no_other() -> None:
    loop, done, errors = asyncio.get_running_loop(), list[str](), list[object]()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fail() -> None:
        raise ValueError

    turn_of("a").queue(fail, TURN_WORK)
    turn_of("a").queue(partial(done.append, "a"), TURN_WORK)
    turn_of("b").queue(partial(done.append, "b"), TURN_WORK)
    await iterate(4)
    assert sorted(done) == ["a", "b"]
    assert [type(error) for error in errors] == [ValueError]


async def test_the_turn_of_a_request_is_that_of_its_tenant_in_all_its_tasks() -> None:
    async def find_turn() -> object:
        return current_turn()

    assert current_turn() is turn_of("")
    CURRENT_TURN.set(turn_of("a"))
    assert await asyncio.create_task(find_turn()) is turn_of("a")


@pytest.mark.parametrize("work", [1, TURN_WORK])
async def test_an_idle_event_loop_is_not_woken(work: int) -> None:
    """The rounds end with the work."""
    turn_of("a").queue(lambda: None, work)
    await iterate(5)
    rounds = list[int]()
    loop = asyncio.get_running_loop()
    for _ in range(3):
        loop.call_soon(rounds.append, 1)
        await asyncio.sleep(0)
    assert not [handle for handle in loop._ready if "_serve_round" in repr(handle)]  # type: ignore[attr-defined]  # what the loop will call
