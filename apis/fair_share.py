"""FairShare: places of one scarce resource, shared by tenants so that a flood by one of them delays no other for long.

It is used for all that is scarce in one process: sessions, child processes, batches of a model, connections.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Final, Self

import msgspec

from apis.errors import RateLimited

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants that the run config names. A provider whose constructor has a parameter of this type receives it."""

    names: frozenset[str] = frozenset()
    may_grow: bool = False
    """True if tenants are created while the server runs."""

    @property
    def are_several(self) -> bool:
        """True if shares of tenants must hold from the first request on."""
        return self.may_grow or len(self.names) > 1


ONE_TENANT: Final = Tenants()
"""Stands for a stack whose tenants are not known, such as one without API keys."""


class Place:
    """One place of a FairShare. Its holder releases it once, by `release()` or by leaving the `with` block."""

    __slots__ = ("_released", "_share", "_taken_at", "tenant")

    def __init__(self, tenant: str, share: "FairShare") -> None:
        self.tenant = tenant
        self._share = share
        self._taken_at = monotonic()
        self._released = False

    def release(self) -> None:
        """Return the place; the next waiting request gets it at once. A second call does nothing."""
        if not self._released:
            self._released = True
            self._share.return_place(self.tenant, monotonic() - self._taken_at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A request that waits for a place."""

    place: "asyncio.Future[Place]"
    rank: int


class _TenantUse(msgspec.Struct):
    used: int = 0
    spent_s: float = 0
    last_turn: int = 0
    waiters: list[_Waiter] = []

    def insert(self, waiter: "_Waiter") -> None:
        """Add a waiting request after those of its rank and of smaller ones."""
        position = len(self.waiters)
        while position and self.waiters[position - 1].rank > waiter.rank:
            position -= 1
        self.waiters.insert(position, waiter)


class FairShare:
    """Admits tenants to `places` places.

    A free place goes to the waiting tenant that uses the fewest places; among equals, to the one that was served the
    longest time ago; within a tenant, to the request of the smallest rank that came first. Requests of a rank above 0
    wait for all others, of every tenant. So with N tenants waiting, each gets at least
    one of N places that become free, however many requests another tenant has.

    - `tenant_places`: places that one tenant may use at a time where there are several tenants, default half of them.
      A tenant waits at this limit even while places are free; so the others find one at once. With one tenant it may
      use all. `several_tenants` says that there are more than one; otherwise the second one that comes shows it.
    - `by_time`: a place that becomes free goes to the waiting tenant that has held places for the shortest time since
      it last came, and ranks order the requests of one tenant only. So many short requests of a tenant wait for one
      long one of another, not for one each.
    - `tenant_waiting`: requests of one tenant that may wait; the next one raises RateLimited. None: no limit.

    All methods run on one event loop.
    """

    def __init__(
        self,
        resource: str,
        places: int,
        *,
        tenant_places: int | None = None,
        tenant_waiting: int | None = None,
        several_tenants: bool = False,
        by_time: bool = False,
    ) -> None:
        """`resource` is a plural noun for the error message, such as "files being read"."""
        self._resource = resource
        self._places = places
        self._tenant_places = min(places, tenant_places or max(1, places // 2))
        self._tenant_waiting = tenant_waiting
        self._tenants: dict[str, _TenantUse] = {}
        self._first_tenant: str | None = None
        self._several_tenants = several_tenants
        self._by_time = by_time
        self._served_s = 0.0
        self._used = self._waiting = 0
        self._turn = 0

    @property
    def used(self) -> int:
        """Number of places in use."""
        return self._used

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place."""
        return self._waiting

    @property
    def tenants(self) -> int:
        """Number of tenants that use or wait for a place."""
        return len(self._tenants)

    def used_by(self, tenant: str) -> int:
        """Number of places that `tenant` uses."""
        use = self._tenants.get(tenant)
        return use.used if use else 0

    def try_acquire(self, tenant: str, *, at_least: int = 0) -> Place | None:
        """Return a place, or None if `tenant` would have to wait for one. It may use `at_least` so many places, where
        they are free, even if its share is smaller."""
        if tenant != self._first_tenant:
            if self._first_tenant is None:
                self._first_tenant = tenant
            else:
                self._several_tenants = True
        use = self._tenants.get(tenant)
        if self._used >= self._places or (use and (use.waiters or use.used >= max(self._tenant_limit, at_least))):
            return None
        return self._take_place(tenant, use)

    def acquire_or_reclaim(self, tenant: str, end_idle_use: Mapping[Place, Callable[[], object]]) -> Place | None:
        """Return a place as `try_acquire` does, for which one that is idle may be reclaimed.

        `end_idle_use` has the idle places, in the order of preference, each with the function that ends its use
        without releasing it. A place of `tenant` itself comes first; a place of another is reclaimed only from the
        tenant that uses most, and only if it uses more than `tenant` does.
        """
        place = self.try_acquire(tenant)
        if place is not None or not end_idle_use:
            return place
        used = self.used_by(tenant)
        idle_place = max(end_idle_use, key=lambda idle: (idle.tenant == tenant, self.used_by(idle.tenant)))
        if idle_place.tenant == tenant:
            end_idle_use[idle_place]()
            return idle_place
        if used >= self._tenant_limit or self.used_by(idle_place.tenant) <= used:
            return None
        end_idle_use[idle_place]()
        idle_place.release()
        return self.try_acquire(tenant)

    async def acquire(self, tenant: str, *, rank: int = 0) -> Place:
        """Return a place as soon as it is the tenant's turn. Among its waiting requests, smaller ranks come first.

        Raises RateLimited if too many requests of the tenant wait already. A caller that is cancelled leaves the queue.
        """
        place = self.try_acquire(tenant)
        if place is not None:
            return place
        use = self._tenants.setdefault(tenant, _TenantUse(spent_s=self._served_s))
        if self._tenant_waiting is not None and len(use.waiters) >= self._tenant_waiting:
            raise RateLimited(
                f"Too many {self._resource} wait already: at most {self._tenant_waiting} at a time.",
                retry_after_s=_RETRY_AFTER_S,
            )
        waiter = _Waiter(asyncio.get_running_loop().create_future(), rank)
        use.insert(waiter)
        self._waiting += 1
        try:
            return await waiter.place
        except BaseException:
            if waiter.place.done() and not waiter.place.cancelled():
                waiter.place.result().release()  # the place came in the same moment as the cancellation
            elif waiter in use.waiters:
                use.waiters.remove(waiter)
                self._waiting -= 1
                self._forget_idle(tenant)
            raise

    @property
    def _tenant_limit(self) -> int:
        return self._tenant_places if self._several_tenants else self._places

    def _take_place(self, tenant: str, use: _TenantUse | None) -> Place:
        if use is None:
            use = self._tenants[tenant] = _TenantUse(spent_s=self._served_s)
        self._turn += 1
        self._served_s = use.spent_s
        self._used += 1
        use.used += 1
        use.last_turn = self._turn
        return Place(tenant, self)

    def return_place(self, tenant: str, held_s: float) -> None:
        """Take back a place of the tenant: only `Place.release` calls it, which does so once."""
        self._used -= 1
        use = self._tenants[tenant]
        use.used -= 1
        use.spent_s += held_s if self._by_time else 0
        if self._waiting:
            self._serve_waiting()
        self._forget_idle(tenant)

    def _serve_waiting(self) -> None:
        while self._used < self._places:
            candidates = [
                (use.waiters[0].rank > 0 and not self._by_time, use.used, use.spent_s, use.last_turn, tenant)
                for tenant, use in self._tenants.items()
                if use.waiters and use.used < self._tenant_limit
            ]
            if not candidates:
                return
            tenant = min(candidates)[-1]
            waiter = self._tenants[tenant].waiters.pop(0)
            self._waiting -= 1
            if waiter.place.done():
                self._forget_idle(tenant)  # its caller was cancelled
            else:
                waiter.place.set_result(self._take_place(tenant, self._tenants[tenant]))

    def _forget_idle(self, tenant: str) -> None:
        use = self._tenants.get(tenant)
        if use and not use.used and not use.waiters:
            del self._tenants[tenant]
