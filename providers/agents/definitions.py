"""StoredDefinitions: the agents of tenants in the KVStore, below TENANT/agent/ID.

The secrets of MCP servers are stored apart (agent_secrets.py).
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from apis.agents import MODEL_PREFIX
from apis.agents.agents import AgentListParams, CreateAgent, UpdateAgent
from apis.chat import ChatRequest
from apis.errors import AgentNotFound, InvalidRequest, ModelNotFound, StorageCorrupt
from apis.responses import CreateResponse
from apis.storage.keys import new_id_key, record_id
from apis.storage.kv_store import KVStore, Op
from apis.storage.pages import Page
from apis.vaults.vaults import Vaults
from providers.agents.agent_secrets import AgentSecrets
from providers.agents.descriptions import (
    Json,
    apply_to_chat,
    apply_to_response,
    check_size,
    complete_agent,
    describe_options,
    show_tools,
)
from providers.common.state.tenant_records import TenantRecords

ID_PREFIX: Final = "agent_"


class AgentRecord(msgspec.Struct):
    """The fields of an agent that a client sets, and its times in seconds of Unix time."""

    fields: Json
    created_at: int
    updated_at: int


class StoredDefinitions:
    """The agents of one store, of which a tenant may have `max_agents`."""

    def __init__(self, kv: KVStore, vaults: Vaults | None, max_agents: int) -> None:
        self._kv = kv
        self._secrets = AgentSecrets(kv, vaults)
        self._max_agents = max_agents
        self._records = TenantRecords(kv, "agent", AgentRecord, lambda _: agent_not_found())

    async def create(self, request: CreateAgent, *, tenant: str) -> Json:
        """Create an agent. Raises InvalidRequest for one that is too large, and if the tenant has as many as it
        may."""
        await self._kv.require_room(tenant)
        now, agent_id = int(time.time()), new_agent_id()
        described = {**describe_options(request), **_describe_names(request), "model": request.model}
        fields = check_size(complete_agent(described))
        tools, secrets = self._secrets.split(fields["tools"], tenant, agent_id)
        record = AgentRecord({**fields, "tools": tools}, now, now)
        await self._records.create(tenant, agent_id, record, self._max_agents, self._build_error, secrets)
        return await self._show(agent_id, record, tenant)

    async def get(self, agent_id: str, *, tenant: str) -> Json:
        """Return the agent. Raises AgentNotFound."""
        return await self._show(agent_id, await self._records.load(tenant, agent_id), tenant)

    async def load_fields(self, agent_id: str, *, tenant: str) -> Json:
        """Return the fields of the agent, also those that are not shown. Raises AgentNotFound."""
        return await self._secrets.join((await self._records.load(tenant, agent_id)).fields, tenant, agent_id)

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
            return await self.load_fields(model.removeprefix(MODEL_PREFIX), tenant=tenant)
        except AgentNotFound:
            raise ModelNotFound(model) from None

    async def list(self, params: AgentListParams, *, tenant: str) -> Page[Json]:
        """Return a page of agents. Raises AgentNotFound for an unknown cursor."""
        page = await self._records.list(tenant, params, lambda agent_id, record: (agent_id, record))
        return Page([await self._show(*each, tenant) for each in page.data], page.has_more, page.last_id)

    async def update(self, agent_id: str, request: UpdateAgent, *, tenant: str) -> Json:
        """Change the fields that the request has, and return the agent. Raises AgentNotFound, and InvalidRequest for
        an agent that would be too large."""
        changes = {**describe_options(request), **_describe_names(request)}
        if "model" in request.model_fields_set:
            changes["model"] = request.model
        secrets: Sequence[Op] = ()
        if "tools" in changes:
            changes["tools"], secrets = self._secrets.split(changes["tools"], tenant, record_id(agent_id))

        def edit(record: AgentRecord) -> AgentRecord:
            return AgentRecord(check_size({**record.fields, **changes}), record.created_at, int(time.time()))

        record = await self._records.change(tenant, agent_id, edit, also=lambda _: secrets)
        return await self._show(agent_id, record, tenant)

    async def delete(self, agent_id: str, *, tenant: str) -> Json:
        """Delete the agent; its sessions go on with what it was. Raises AgentNotFound."""
        await self._records.delete(tenant, agent_id, lambda _: self._secrets.build_delete(tenant, agent_id))
        return {"id": agent_id, "object": "agent.deleted", "deleted": True}

    def _build_error(self, _count: int) -> InvalidRequest:
        return InvalidRequest(f"A project has at most {self._max_agents} agents (`agents.max_agents`).")

    async def _show(self, agent_id: str, record: AgentRecord, tenant: str) -> Json:
        """Return an agent as the API shows it; headers that cannot be read are left out."""
        fields = record.fields
        with suppress(StorageCorrupt):
            fields = await self._secrets.join(fields, tenant, agent_id)
        times = {"created_at": record.created_at, "updated_at": record.updated_at}
        tools = show_tools(fields["tools"], in_session=False)
        return {**fields, "id": agent_id, "object": "agent", **times, "tools": tools}


def new_agent_id() -> str:
    """Return a new id of an agent."""
    return f"{ID_PREFIX}{new_id_key()}"


def agent_not_found() -> AgentNotFound:
    """Return the error of an id that no agent of the tenant has."""
    return AgentNotFound("No agent has this id.", param="agent_id")


def _describe_names(request: CreateAgent | UpdateAgent) -> Json:
    """Return the name and the metadata of a request that has them."""
    sent = request.model_fields_set
    names: Json = {} if "name" not in sent and isinstance(request, UpdateAgent) else {"name": request.name}
    if "metadata" in sent or isinstance(request, CreateAgent):
        names["metadata"] = request.metadata or {}
    return names
