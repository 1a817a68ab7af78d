"""StoredAgents: the Agents API over a KVStore, and over the Responses API of the same stack."""

from pydantic import Field

from apis.agents.agents import MODEL_PREFIX
from apis.agents.automations import AutomationTarget, ExistingSessionTarget, ResponseTarget
from apis.batches.batches import RequestExecutor
from apis.chat import ChatRequest
from apis.errors import (
    AgentNotFound,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Unsupported,
)
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.provider import Provider
from apis.responses import CreateResponse, Responses
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolRuntime
from apis.vaults.vaults import Vaults, check_vaults
from apis.webhooks import Webhooks
from providers.agents.activity import SessionActivity
from providers.agents.automations import StoredAutomations
from providers.agents.definitions import StoredDefinitions
from providers.agents.deliveries import TargetDeliverer
from providers.agents.descriptions import Json, apply_to_chat, apply_to_response
from providers.agents.environments import EnvironmentQueue, HostedEnvironments, QueueTimes
from providers.agents.invocations import AutomationQueue
from providers.agents.sessions import StoredSessions
from providers.agents.store import SessionStore
from providers.agents.targets import build_session_request
from providers.agents.turns import TurnQueue
from providers.common.state.worker_signs import WorkerSign


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
        self._responses = responses
        self._vaults = vaults
        self._tenants = tenants
        self._sign = WorkerSign(kv_store, config.lease_s)
        self._store = SessionStore(kv_store, webhooks, config.event_days * 86_400)
        self._turns: TurnQueue | None = None
        self.definitions = StoredDefinitions(kv_store, vaults, config.max_agents)
        self.sessions = StoredSessions(kv_store, self._store, self.definitions, responses, vaults)
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

    def drive_with(self, executor: RequestExecutor) -> None:
        """Drive turns in this process from now on, until it drains or closes."""
        config = self._config
        places = FairShare("turns of sessions", config.max_turns, several_tenants=self._tenants.are_several)
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
                self._tenants,
                QueueTimes(config.lease_s, config.retry_s, config.poll_s, config.environment_days * 86_400),
            )
            self._environment_queue.start()
        deliverer = TargetDeliverer(self.sessions, self.activity, self._responses, executor)
        self._automation_queue = AutomationQueue(
            self.automations, deliverer, self._sign, self._tenants, lease_s=config.lease_s, poll_s=config.poll_s
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

    async def resolve_response(self, request: CreateResponse, *, tenant: str) -> CreateResponse:
        """Return a request whose model is `agent/ID` with the fields of that agent put under its own. Raises
        ModelNotFound."""
        return apply_to_response(await self._load(request.model, tenant), request)

    async def resolve_chat(self, request: ChatRequest, *, tenant: str) -> ChatRequest:
        """Return a chat whose model is `agent/ID` as `resolve_response` does. Raises ModelNotFound, and Unsupported for
        an agent with tools that only a response runs."""
        return apply_to_chat(await self._load(request.model, tenant), request)

    async def _load(self, model: str, tenant: str) -> Json:
        try:
            return await self.definitions.load_fields(model.removeprefix(MODEL_PREFIX), tenant=tenant)
        except AgentNotFound:
            raise ModelNotFound(model) from None

    def _wake_environments(self) -> None:
        if self._environment_queue is not None:
            self._environment_queue.wake()
