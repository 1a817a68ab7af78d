"""Memory that large requests have freed goes back to the system, but not while others are in progress."""

import asyncio

import psutil

from apis.fair_share import FairShare
from stack.http.freed_memory import find_trim, return_freed_memory
from tests.support.waiting import until

MIB = 1024 * 1024


class WatchedShare(FairShare):
    """Counts how often its use is read."""

    looks = 0

    @property
    def used(self) -> int:
        self.looks += 1
        return super().used


async def looked_at(share: WatchedShare, times: int) -> None:
    """Return when the watch has looked at the share that many times more."""
    enough = share.looks + times
    await until(lambda: share.looks >= enough)


async def test_memory_is_returned_when_the_last_large_request_is_over() -> None:
    share, calls = WatchedShare("bytes", 10), list[int]()

    def trim(pad: int) -> int:
        calls.append(pad)
        return 1

    watch = asyncio.create_task(return_freed_memory(share, trim, 0.005))
    await looked_at(share, 1)  # so that the size at the start was read
    place = share.try_acquire("a")
    assert place is not None
    grown = bytearray(b"x" * 100 * MIB)
    await looked_at(share, 3)
    assert calls == []
    place.release()
    await until(lambda: calls)
    await looked_at(share, 3)
    assert calls == [0], "it is returned once, and not again as long as the process does not grow"
    watch.cancel()
    assert len(grown) == 100 * MIB


def test_the_library_gives_back_what_was_freed_between_blocks_in_use() -> None:
    trim = find_trim()
    if trim is None:  # no glibc
        return
    blocks = [bytes([number % 256]) * 100_000 for number in range(2000)]
    blocks_in_use = blocks[::100]
    del blocks
    before = psutil.Process().memory_info().rss
    trim(0)
    assert psutil.Process().memory_info().rss < before - 100 * MIB
    assert len(blocks_in_use) == 20
