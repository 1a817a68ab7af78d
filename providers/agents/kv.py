"""StoredAgents: the Agents API over a KVStore, and over the Responses API of the same stack."""

import asyncio
import logging
from typing import TYPE_CHECKING

from pydantic import Field

from apis.batches.batches import RequestExecutor
from apis.errors import StackError
from apis.fair_share import ONE_TENANT, Tenants
from apis.imports import import_from_string
from apis.provider import Provider
from apis.responses import Responses
from apis.storage.kv_store import KVStore
from apis.ticks import wait_for_tick
from apis.tool_runtime import ToolRuntime
from apis.vaults.vaults import Vaults
from apis.webhooks import Webhooks
from providers.agents.work import has_work
from providers.common.supervision import supervise

if TYPE_CHECKING:  # a process without a session, an automation or an environment does not load its modules
    from providers.agents.definitions import StoredDefinitions
    from providers.agents.live import LiveAgents

_log = logging.getLogger(__name__)


class StoredAgents(Provider):
    """The agents and sessions of all tenants of a store. Another tenant's id is an unknown id.

    Promises (tests/spec/agents):
    - An event of a session that was taken is in the store, in the same step as what it changes.
    - Events have numbers without gaps, and each is written once, whichever worker ends at which moment.
    - A turn that waits for its client needs no worker, for as long as it takes.
    """

    class Config(Provider.Config):
        """`max_agents` bounds the agents of one tenant. A process drives up to `max_turns` turns at a time; another one
        goes on with a turn `lease_s` after its process has ended. Events are stored for `event_days`, and the
        invocations of automations, of which a tenant may have `max_automations`, for `invocation_days`. A workspace is
        suspended `environment_idle_s` after its last turn, and its files are deleted `environment_days` later."""

        max_agents: int = Field(default=1000, ge=1, le=100_000)
        max_automations: int = Field(default=1000, ge=1, le=100_000)
        invocation_days: float = Field(default=30, gt=0, le=3650)
        max_turns: int = Field(default=256, ge=1, le=100_000)
        lease_s: float = Field(default=10, ge=0.5, le=600)
        poll_s: float = Field(default=1, gt=0, le=60)
        retry_s: float = Field(default=2, gt=0, le=600)
        event_days: float = Field(default=30, gt=0, le=3650)
        environment_idle_s: float = Field(default=1200, ge=1, le=86_400)
        environment_days: float = Field(default=30, gt=0, le=3650)

    def __init__(
        self,
        config: Config,
        kv_store: KVStore,
        responses: Responses,
        webhooks: Webhooks,
        vaults: Vaults | None,
        tool_runtime: ToolRuntime | None,
        tenants: Tenants = ONE_TENANT,
    ) -> None:
        self._config = config
        self._kv = kv_store
        self._vaults = vaults
        self._tenants = tenants
        self._parts = (config, kv_store, responses, webhooks, vaults, tool_runtime)
        self._definitions: StoredDefinitions | None = None
        self._live: LiveAgents | None = None
        self._executor: RequestExecutor | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_draining = False

    async def load_definitions(self) -> "StoredDefinitions":
        """Return the definitions of the agents. The first call imports their modules, in a thread."""
        if self._definitions is None:
            build: type[StoredDefinitions] = await asyncio.to_thread(
                import_from_string, "providers.agents.definitions:StoredDefinitions"
            )
            self._definitions = self._definitions or build(self._kv, self._vaults, self._config.max_agents)
        return self._definitions

    async def load(self) -> "LiveAgents":
        """Return the sessions, automations and environments of the agents. The first call imports their modules, in a
        thread, and begins to drive turns where this process does."""
        if self._live is None:
            definitions = await self.load_definitions()
            build: type[LiveAgents] = await asyncio.to_thread(import_from_string, "providers.agents.live:LiveAgents")
            if self._live is None:  # no other call was faster
                self._live = build(definitions, *self._parts)
                if self._is_draining:
                    await self._live.drain()
                elif self._executor is not None:
                    self._live.drive_with(self._executor, self._tenants)
        return self._live

    @property
    def live(self) -> "LiveAgents":
        """The agents that `load` has returned."""
        assert self._live is not None
        return self._live

    def drive_with(self, executor: RequestExecutor) -> None:
        """Drive turns in this process from now on, until it drains or closes: from the first request to a session, or
        from the moment on at which the store has work."""
        self._executor = executor
        self._watcher = supervise("the watcher of agents", self._wait_for_work)

    async def _wait_for_work(self) -> None:
        wakeup = asyncio.Event()
        while self._live is None:
            try:
                if await has_work(self._kv):
                    await self.load()
            except StackError as exc:
                _log.warning("agents wait: %s", exc.message)
            await wait_for_tick(wakeup, self._config.poll_s)
            wakeup.clear()

    async def drain(self) -> None:
        """Drive no more turns, and end the streams of readers: another process goes on with both."""
        self._stop_watching()
        if self._live is not None:
            await self._live.drain()

    async def close(self) -> None:
        self._stop_watching()
        if self._live is not None:
            await self._live.close()

    def _stop_watching(self) -> None:
        self._is_draining = True
        if self._watcher is not None:
            self._watcher.cancel()
