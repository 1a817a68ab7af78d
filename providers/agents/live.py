"""LiveAgents: the sessions, automations and environments of agents, with the queues of what they have to do."""

from typing import TYPE_CHECKING

from apis.agents.automations import AutomationTarget, ExistingSessionTarget, ResponseTarget
from apis.batches.batches import RequestExecutor
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.fair_share import FairShare, Tenants
from apis.responses import CreateResponse, Responses
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolRuntime
from apis.vaults.vaults import Vaults, check_vaults
from apis.webhooks import Webhooks
from providers.agents.activity import SessionActivity
from providers.agents.automations import StoredAutomations
from providers.agents.definitions import StoredDefinitions
from providers.agents.deliveries import TargetDeliverer
from providers.agents.descriptions import Json, apply_to_response
from providers.agents.environments import EnvironmentQueue, HostedEnvironments, QueueTimes
from providers.agents.invocations import AutomationQueue
from providers.agents.sessions import StoredSessions
from providers.agents.store import SessionStore
from providers.agents.targets import build_session_request
from providers.agents.turns import TurnQueue
from providers.common.state.worker_signs import WorkerSign

if TYPE_CHECKING:  # which imports this module when it is needed
    from providers.agents.kv import StoredAgents


class LiveAgents:
    """The sessions, automations and environments of StoredAgents. A process loads them with the first request to them,
    or when the store has work for them."""

    def __init__(
        self,
        definitions: StoredDefinitions,
        config: "StoredAgents.Config",
        kv_store: KVStore,
        responses: Responses,
        webhooks: Webhooks,
        vaults: Vaults | None,
        tool_runtime: ToolRuntime | None,
    ) -> None:
        self.definitions = definitions
        self._config = config
        self._responses = responses
        self._vaults = vaults
        self._sign = WorkerSign(kv_store, config.lease_s)
        self._store = SessionStore(kv_store, webhooks, config.event_days * 86_400)
        self._turns: TurnQueue | None = None
        self.sessions = StoredSessions(kv_store, self._store, definitions, responses, vaults)
        self.activity = SessionActivity(self._store, responses)
        self.automations = StoredAutomations(
            kv_store, vaults, max_automations=config.max_automations, retention_s=config.invocation_days * 86_400
        )
        self._automation_queue: AutomationQueue | None = None
        self.environments: HostedEnvironments | None = None
        self._containers = tool_runtime.containers() if tool_runtime is not None else None
        self._environment_queue: EnvironmentQueue | None = None
        workspaces = tool_runtime.workspaces() if tool_runtime is not None else None
        if workspaces is not None:
            self.environments = HostedEnvironments(
                self._store, webhooks, workspaces, vaults, config.environment_idle_s, self._wake_environments
            )
            self.sessions.environments = self.environments

    def drive_with(self, executor: RequestExecutor, tenants: Tenants) -> None:
        """Drive turns in this process from now on, until it drains or closes."""
        config = self._config
        places = FairShare("turns of sessions", config.max_turns, several_tenants=tenants.are_several)
        queue = TurnQueue(
            self._store,
            self._responses,
            executor,
            places,
            self._vaults,
            lease_s=config.lease_s,
            retry_s=config.retry_s,
        )
        queue.environments = self.environments
        queue.end_deletion = self.sessions.end_deletion
        self._turns = queue
        self._sign.start()
        queue.start(self._sign, config.poll_s)
        if self.environments is not None and self._containers is not None:
            self._environment_queue = EnvironmentQueue(
                self.environments,
                self._containers,
                self._sign,
                tenants,
                QueueTimes(config.lease_s, config.retry_s, config.poll_s, config.environment_days * 86_400),
            )
            self._environment_queue.start()
        deliverer = TargetDeliverer(self.sessions, self.activity, self._responses, executor)
        self._automation_queue = AutomationQueue(
            self.automations, deliverer, self._sign, tenants, lease_s=config.lease_s, poll_s=config.poll_s
        )
        self._automation_queue.start()

    async def drain(self) -> None:
        """Drive no more turns, and end the streams of readers: another process goes on with both."""
        self._store.logs.is_closing = True
        self._store.logs.wakeups.wake_all()
        await self._stop_jobs()

    async def close(self) -> None:
        await self._stop_jobs()
        await self._sign.close()

    async def _stop_jobs(self) -> None:
        if self._automation_queue is not None:
            await self._automation_queue.close()
        if self._turns is not None:
            await self._turns.close()
        if self._environment_queue is not None:
            await self._environment_queue.close()

    def require_environments(self) -> HostedEnvironments:
        """Return the environments. Raises Unsupported where this server has no workspaces."""
        if self.environments is None:
            message = "This server has no environments: give its config's `tool_runtime` the provider `python`."
            raise Unsupported(message, param="environment.type", code="not_configured")
        return self.environments

    def build_request(self, agent: Json, vault_ids: list[str] | None, *, is_hosted: bool = False) -> CreateResponse:
        """Return a request that a session of the agent makes, for permissions; one with an environment has a shell.
        Raises InvalidRequest for tools that no response has."""
        shell = [{"type": "shell", "environment": {"type": "container_auto"}}] if is_hosted else []
        fields = {"model": agent["model"], "vault_ids": vault_ids, "tools": shell}
        return apply_to_response(agent, CreateResponse.model_validate(fields))

    async def resolve_target(self, target: AutomationTarget, *, tenant: str) -> CreateResponse | None:
        """Return a request that an invocation of the target makes, for permissions; None for a target whose session
        exists. Raises AgentNotFound, InvalidRequest and Unsupported."""
        if isinstance(target, ExistingSessionTarget):
            await self.sessions.get(target.session_id, tenant=tenant)
            return None
        if isinstance(target, ResponseTarget):
            return target.request
        await check_vaults(self._vaults, target.vault_ids, tenant=tenant)
        agent = await self.sessions.resolve_agent(build_session_request(target), tenant=tenant)
        is_hosted = target.environment.type == "openai_hosted"
        if is_hosted:
            try:
                await self.require_environments().check(target.environment, tenant=tenant)
            except (InvalidRequest, NotFound, Unsupported) as exc:
                exc.param = f"target.{exc.param or 'environment'}"
                raise
        return self.build_request(agent[1], target.vault_ids, is_hosted=is_hosted)

    def _wake_environments(self) -> None:
        if self._environment_queue is not None:
            self._environment_queue.wake()
