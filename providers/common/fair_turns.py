"""Turns of the event loop by tenant: who causes much work at once has it done in pieces, between the work of others.

One event loop serves all tenants of a process, and a piece of work on it delays everybody. So each tenant has a turn in
every iteration of the loop. Work within the turn is done at once, as nearly all is: a token, a small request. Work
beyond it is cut into pieces and queued; every iteration then does one piece of each of a few tenants, in rotation, and
looks at the sockets of all others between two iterations.

    def data_received(self, data: bytes) -> None:
        if self.turn.takes(len(data)):
            self.parse(data)
        else:
            self.hold(data)                         # and turn.queue(self.parse_a_piece, PIECE_BYTES)
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from apis.fair_share import FairShare

ResultT = TypeVar("ResultT")
ValueT = TypeVar("ValueT")
TURN_WORK: Final = 16 * 1024
"""Work of one tenant in one iteration of the event loop. The unit is the work on one byte of a model's stream, some
tenth of a microsecond; other work counts by what it costs compared with that."""
_UNNOTICED_WORK: Final = TURN_WORK // 2
"""Work above which the next iteration of the event loop begins a new turn."""
REQUEST_WORK: Final = TURN_WORK // 4
"""Work on a small request, apart from its model's stream."""
_TENANTS_PER_ROUND: Final = 4
"""Tenants with queued work that one iteration of the event loop serves."""
_THREADS: Final = 2
"""Calculations at a time, each of another tenant. They hold the GIL: more threads that pass it to each other would keep
it from the event loop for seconds."""
_LONG_S: Final = 0.005
_MAX_REST_S: Final = 0.25
_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fair-turns")


class TenantTurn:
    """The turn of one tenant on one event loop. `spent` is the work that it has done; above TURN_WORK, more work has to
    be queued, also while other work of the tenant is."""

    __slots__ = ("__weakref__", "_pieces", "_renewal", "_rounds", "spent", "tenant")

    def __init__(self, tenant: str, rounds: "_Rounds") -> None:
        self.tenant = tenant
        self.spent = 0
        self._rounds = rounds
        self._pieces: deque[tuple[Callable[[], object], int]] = deque()
        self._renewal: asyncio.Handle | None = None

    def takes(self, work: int = 0) -> bool:
        """Count work, and return true if it is to be done now, false if it has to be queued.

        The work of some iterations may count as that of one: a token costs less than to notice each iteration.
        """
        self.spent += work
        if self.spent > _UNNOTICED_WORK and self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_soon(self._renew)
        return self.spent <= TURN_WORK

    @property
    def piece_work(self) -> int:
        """The work of one piece that is queued. While no other tenant has a connection, it is as much as an iteration
        does for several."""
        return TURN_WORK if len(self._rounds.turns) > 1 else _TENANTS_PER_ROUND * TURN_WORK

    def _renew(self) -> None:
        self._renewal = None
        if not self._pieces:
            self.spent = 0

    def queue(self, do_piece: Callable[[], object], work: int) -> None:
        """Call `do_piece` at a turn of the tenant, after the pieces that it has queued before. What is left to do then
        is to be queued again."""
        self._pieces.append((do_piece, work))
        self._rounds.add(self)

    async def wait(self, work: int) -> None:
        """Wait until the tenant may do this work: at once, where its turn is not spent."""
        if not self.takes(work):
            waiter = asyncio.get_running_loop().create_future()
            self.queue(lambda: None if waiter.done() else waiter.set_result(None), work)
            await waiter

    def serve(self) -> bool:
        """Begin a new turn with the queued pieces; return true if some are left for the next one."""
        pieces, self.spent = self._pieces, 0
        if self._renewal is not None:  # it would begin a second turn in this iteration
            self._renewal.cancel()
            self._renewal = None
        while pieces and self.spent < TURN_WORK:
            do_piece, work = pieces.popleft()
            self.takes(work)
            do_piece()
        if pieces:
            self.spent = TURN_WORK + 1
        return bool(pieces)


class _Rounds:
    """The turns of all tenants on one event loop, and the rotation of those that have queued work."""

    def __init__(self) -> None:
        self._waiting: dict[TenantTurn, None] = {}
        self._is_scheduled = False
        self.calculations = FairShare("calculations", _THREADS, tenant_places=1, several_tenants=True)
        self.turns: WeakValueDictionary[str, TenantTurn] = WeakValueDictionary()

    def add(self, turn: TenantTurn) -> None:
        turn.spent = TURN_WORK + 1
        self._waiting[turn] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve_round)

    def _serve_round(self) -> None:
        self._is_scheduled = bool(self._waiting)
        if not self._waiting:
            return
        asyncio.get_running_loop().call_soon(self._serve_round)  # before the pieces, of which one may raise
        for turn in list(islice(self._waiting, _TENANTS_PER_ROUND)):
            self._waiting[turn] = self._waiting.pop(turn)  # to the end of the rotation
            if not turn.serve():
                del self._waiting[turn]


_rounds_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Rounds] = WeakKeyDictionary()

CURRENT_TURN: Final[ContextVar[TenantTurn | None]] = ContextVar("turn", default=None)
"""The turn of the tenant whose request the current task works for."""


def _rounds_of_loop() -> _Rounds:
    loop = asyncio.get_running_loop()
    rounds = _rounds_by_loop.get(loop)
    if rounds is None:
        rounds = _rounds_by_loop[loop] = _Rounds()
    return rounds


def turn_of(tenant: str) -> TenantTurn:
    """Return the turn of a tenant on the running event loop; '' stands for the server itself."""
    rounds = _rounds_of_loop()
    turn = rounds.turns.get(tenant)
    if turn is None:
        turn = rounds.turns[tenant] = TenantTurn(tenant, rounds)
    return turn


def current_turn() -> TenantTurn:
    """Return the turn of the tenant that the current task works for."""
    return CURRENT_TURN.get() or turn_of("")


async def run_long(function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Return `function(*arguments)`: a piece of work on the event loop that may take long and holds the GIL, so that a
    thread would not help. One piece of a tenant runs at a time, and after it the loop is left to others for as long."""
    turn = current_turn()
    with await _rounds_of_loop().calculations.acquire(turn.tenant):
        await turn.wait(TURN_WORK)
        began = monotonic()
        result = function(*arguments)
        took_s = monotonic() - began
        if took_s > _LONG_S:
            await asyncio.sleep(min(took_s, _MAX_REST_S))
    return result


async def calculate(function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Return `function(*arguments)`, computed in a thread for work that takes long and cannot be cut into pieces. One
    call of a tenant runs at a time, and the tenants take turns."""
    return await run_in_turn(_rounds_of_loop().calculations, _threads, partial(function, *arguments))


async def run_in_turn(share: FairShare, threads: ThreadPoolExecutor, function: Callable[[], ResultT]) -> ResultT:
    """Return `function()`, run in one of the threads, whose places are `share`, at the turn of the tenant that the
    current task works for. Where the caller is cancelled, the place is taken until the thread is free."""
    loop = asyncio.get_running_loop()
    place = await share.acquire(current_turn().tenant)

    def release(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(place.release)

    try:
        call = threads.submit(function)
    except BaseException:
        place.release()
        raise
    call.add_done_callback(release)
    return await asyncio.wrap_future(call)


_PASS_WORK: Final = 20
FEW_VALUES: Final = 16
"""Values of a pass that takes less than to count it."""


async def end_pass(values: Sized) -> None:
    """Count a pass over many values, which is done, as work of the tenant that the current task works for.
    The loop is left to others before the next one."""
    if len(values) > FEW_VALUES:
        await current_turn().wait(len(values) * _PASS_WORK)


_PIECE_VALUES: Final = 64


async def do_in_turns(values: Sequence[ValueT], do: Callable[[ValueT], object], work: int) -> None:
    """Call `do` with each of the values, at turns of the tenant that the current task works for; each call is `work`. A
    few values are done at once."""
    for start in range(0, len(values), _PIECE_VALUES):
        if start:
            await current_turn().wait(_PIECE_VALUES * work)
        for value in values[start : start + _PIECE_VALUES]:
            do(value)
