"""StoredSessions: sessions of agents as clients use them."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Final

import orjson

from apis.agents.agents import AgentOptions
from apis.agents.environments import NoEnvironment
from apis.agents.sessions import (
    CreateSession,
    EventStreamParams,
    RequestKey,
    SessionEnvironment,
    SessionListParams,
    SessionMessage,
    UpdateSession,
)
from apis.conversations import CreateConversation
from apis.errors import Conflict, InvalidRequest, NotFound, Unsupported
from apis.events import LoggedEvent
from apis.responses import Responses
from apis.storage.keys import new_id_key, record_id
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import PAGE_BYTES, decode_record, encode_record
from apis.vaults.vaults import Vaults, check_vaults
from providers.agents.agent_secrets import AgentSecrets
from providers.agents.definitions import StoredDefinitions, new_agent_id
from providers.agents.descriptions import check_size, complete_agent, describe_options, describe_tools
from providers.agents.environments.hosted import HostedEnvironments
from providers.agents.records import Json, SessionRef, SessionState, StoredSession
from providers.agents.store import SessionStore, session_not_found
from providers.agents.subagents.records import build_conversation_id
from providers.agents.transition import Transition
from providers.common.jobs import JobRecord
from providers.common.state.change import write_prepared
from providers.common.state.event_logs import Log
from providers.common.state.scan import find_cursor, list_matching, skipping_damaged

_END_S: Final = 30 * 86_400.0
"""Seconds for which a deleted session is remembered."""


class StoredSessions:
    """The sessions of one store."""

    def __init__(
        self,
        kv: KVStore,
        store: SessionStore,
        definitions: StoredDefinitions,
        responses: Responses,
        vaults: Vaults | None,
    ) -> None:
        self._kv = kv
        self._store = store
        self._definitions = definitions
        self._responses = responses
        self._vaults = vaults
        self._secrets = AgentSecrets(kv, vaults)
        self.environments: HostedEnvironments | None = None
        """None where this server has no workspaces."""

    async def resolve_agent(self, request: CreateSession, *, tenant: str) -> tuple[str, Json]:
        """Return the id and the fields of the agent of a new session. Raises AgentNotFound, and InvalidRequest if the
        request names no agent or no model."""
        options = request.agent
        changes = {} if options is None else {**describe_options(options), **_model_of(options)}
        if request.agent_id is not None:
            fields = await self._definitions.load_fields(request.agent_id, tenant=tenant)
            return request.agent_id, check_size({**fields, **changes}, "agent.")
        if "model" not in changes:
            param = "agent" if options is None else "agent.model"
            raise InvalidRequest(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            )
        return new_agent_id(), check_size(complete_agent({"name": None, **changes}), "agent.")

    async def create(
        self,
        request: CreateSession,
        agent: tuple[str, Json],
        *,
        tenant: str,
        key_id: str,
        key: RequestKey | None = None,
    ) -> Json:
        """Create a session of an agent and begin its first turn; one that was created under the key before is returned.
        Raises InvalidRequest for a session without input, and AgentNotFound for an unknown vault."""
        messages = _list_messages(request)
        await check_vaults(self._vaults, request.vault_ids, tenant=tenant)
        await self._kv.require_room(tenant)
        if session_id := await self._store.find_keyed(tenant, key):
            return await self.get(session_id, tenant=tenant)
        environment = await self._prepare_environment(request.environment, tenant)
        cache_ttl = request.prompt_cache_options.ttl if request.prompt_cache_options is not None else None
        now, ref = int(time.time()), SessionRef(tenant, f"sess_{new_id_key()}")
        agent_id, fields = agent
        tools, secrets = self._secrets.split(fields["tools"], tenant, ref.id)
        record = StoredSession(
            agent_id,
            {**fields, "tools": tools},
            conversation_id="",
            metadata=request.metadata or {},
            created_at=now,
            cache_ttl=cache_ttl,
            review=request.review,
            vault_ids=request.vault_ids or [],
        )
        transition = Transition(ref, record, SessionState("idle", now), ABSENT)
        more = await self._begin_environment(transition, request.environment, environment)
        conversations = self._responses.conversations()
        record.conversation_id = (await conversations.create(CreateConversation(), tenant=tenant)).id
        transition.put(ref.session_key, encode_record(record), None, ABSENT)
        if messages:
            transition.begin_turn(messages, key_id)
        visible_session = transition.show_session()
        if not await self._store.write(transition, key, [*secrets, *more]):
            await conversations.delete(record.conversation_id, tenant=tenant)
            return await self.create(request, agent, tenant=tenant, key_id=key_id, key=key)
        if self.environments is not None and record.environment_id:
            self.environments.wake()
        return visible_session

    async def _prepare_environment(self, environment: SessionEnvironment, tenant: str) -> tuple[Json, Json]:
        """Return the stored and the visible fields of a new environment; none for any other."""
        if isinstance(environment, NoEnvironment):
            return {}, {}
        if self.environments is None:
            message = "This server has no environments: give its config's `tool_runtime` the provider `python`."
            raise Unsupported(message, param="environment.type", code="not_configured")
        if environment.environment_id is not None:
            return {}, {}
        return await self.environments.prepare(environment, tenant=tenant)

    async def _begin_environment(
        self, session: Transition, environment: SessionEnvironment, fields: tuple[Json, Json]
    ) -> Sequence[Op]:
        """Begin a session that is created, with its environment, and return the operations that write that one."""
        if isinstance(environment, NoEnvironment) or self.environments is None:
            session.begin_session()
            return ()
        if environment.environment_id is not None:
            return await self.environments.attach(environment, session)
        return self.environments.begin(session, *fields)

    async def get(self, session_id: str, *, tenant: str) -> Json:
        """Return the session. Raises AgentNotFound."""
        session = await self._store.load(_ref(session_id, tenant))
        return session.show_session()

    async def list(self, params: SessionListParams, *, tenant: str) -> Page[Json]:
        """Return a page of sessions; a filtered one may have fewer than there are, and then names the last one that was
        looked at. Raises AgentNotFound for an unknown cursor."""
        prefix = SessionRef(tenant, "").session_key
        cursor = await find_cursor(self._kv, prefix, params.after, session_not_found("after"))
        is_filtered = params.agent_id is not None or bool(params.metadata)
        page = await list_matching(
            self._kv,
            prefix,
            StoredSession,
            cursor,
            order=params.order,
            limit=params.limit,
            accepts=(lambda record: params.accepts(record.agent_id, record.metadata)) if is_filtered else None,
        )
        sessions: list[Json] = []
        room_bytes, last_id = PAGE_BYTES, None
        for row in page.data:
            if room_bytes <= 0:  # of what waits for clients, which is not in the records that the page counts
                return Page(sessions, has_more=True, last_id=last_id)
            last_id = row.key.removeprefix(prefix)
            with skipping_damaged(self._kv, row.key, "SessionState, or a part of its turn"):
                session = await self.get(last_id, tenant=tenant)
                room_bytes -= len(orjson.dumps(session["required_actions"]))
                sessions.append(session)
        return Page(sessions, page.has_more, (page.last_id or last_id) if page.has_more else None)

    async def update(self, session_id: str, request: UpdateSession, *, tenant: str) -> Json:
        """Change the fields that the request has, and return the session. Raises AgentNotFound."""
        if not request.model_fields_set:
            raise InvalidRequest("At least one update field is required.")
        agent = request.agent
        changes: Json = {}
        secrets: Sequence[Op] = ()
        ref = _ref(session_id, tenant)
        if agent is not None:
            changes = _model_of(agent) | describe_options(
                AgentOptions(**{name: getattr(agent, name) for name in agent.model_fields_set - {"model", "tools"}})
            )
            if "tools" in agent.model_fields_set:
                tools = describe_tools(agent.tools or ())
                changes["tools"], secrets = self._secrets.split(tools, tenant, ref.id)

        async def prepare() -> Sequence[Op]:
            session, state = await self._kv.get_many([ref.session_key, ref.state_key])
            if session is None or state is None:
                raise session_not_found()
            record = decode_record(session, StoredSession)
            record.agent = check_size({**record.agent, **changes}, "agent.")
            if "metadata" in request.model_fields_set:
                record.metadata = request.metadata or {}
            if "review" in request.model_fields_set:
                record.review = request.review
            if "prompt_cache_options" in request.model_fields_set:
                options = request.prompt_cache_options
                record.cache_ttl = None if options is None else options.ttl
            # a worker that drives its turn reads the session again once its state has another version
            state_op = Put(ref.state_key, state.value, None, state.version)
            return [Put(ref.session_key, encode_record(record), None, session.version), state_op, *secrets]

        await write_prepared(self._kv, prepare)
        return await self.get(session_id, tenant=tenant)

    async def delete(self, session_id: str, *, tenant: str) -> Json:
        """Delete a session with all that is in it; one that was deleted before, too. Raises AgentNotFound, and Conflict
        while it has a turn."""
        ref = _ref(session_id, tenant)

        async def prepare() -> Sequence[Op] | None:
            conversation_id = environment_id = ""
            session, state_entry, end = await self._kv.get_many([ref.session_key, ref.state_key, ref.end_key])
            if session is None and end is None:
                raise session_not_found()
            if session is None or state_entry is None:
                return None
            with skipping_damaged(self._kv, ref.session_key, StoredSession.__name__):
                record = decode_record(session, StoredSession)
                conversation_id, environment_id = record.conversation_id, record.environment_id
            with skipping_damaged(self._kv, ref.state_key, SessionState.__name__):
                state = decode_record(state_entry, SessionState)
                if state.turn is not None or any(each.turn_id for each in state.subagents.values()):
                    raise Conflict("The session has a turn that has not ended: cancel it first.", param="session_id")
            note = Put(ref.end_key, f"{conversation_id} {environment_id}".encode(), _END_S)
            job = Put(ref.job_key, encode_record(JobRecord()))  # any worker ends the deletion, should this one not
            return [Delete(ref.session_key), Delete(ref.state_key, state_entry.version), note, job]

        await write_prepared(self._kv, prepare)
        await self.end_deletion(ref)
        return {"id": session_id, "object": "agent.session.deleted", "deleted": True}

    async def end_deletion(self, ref: SessionRef) -> None:
        """Delete what a deleted session has left, also where an earlier deletion was broken off. Do nothing for another
        one."""
        session, end = await self._kv.get_many([ref.session_key, ref.end_key])
        if session is not None or end is None:
            return
        conversation_id, _, environment_id = end.value.decode().partition(" ")
        if conversation_id:
            with suppress(NotFound):
                await self._responses.conversations().delete(conversation_id, tenant=ref.tenant)
        if self.environments is not None and (environment_id or not conversation_id):
            await self.environments.delete_of_session(ref, environment_id)
        await self._delete_subagents(ref)
        await self._store.delete_parts(ref)
        await self._kv.write([Delete(ref.job_key), *self._secrets.build_delete(ref.tenant, ref.id)])

    async def _delete_subagents(self, session: SessionRef) -> None:
        while rows := await self._kv.scan(session.subagent_prefix, max_bytes=PAGE_BYTES):
            for key, _ in rows:
                ref = session.subagent(key.removeprefix(session.subagent_prefix))
                with suppress(NotFound):
                    conversation_id = build_conversation_id(ref.subagent_id)
                    await self._responses.conversations().delete(conversation_id, tenant=ref.tenant)
                await self._store.delete_parts(ref)
                await self._kv.write([Delete(ref.state_key), Delete(ref.job_key), Delete(ref.session_key)])

    async def follow(
        self, session_id: str, params: EventStreamParams, *, tenant: str
    ) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """Yield the events of a session after `starting_after`, without it those from now on, until the session is
        deleted. The first batch is empty. Raises AgentNotFound, and InvalidRequest if the events are no longer
        stored."""
        session = await self._store.load(_ref(session_id, tenant))
        first = session.state.events if params.starting_after is None else params.starting_after + 1
        yield ()
        async with aclosing(self._read(session.ref, min(first, session.state.events), lambda _: False)) as batches:
            async for events in batches:
                yield events

    async def follow_creation(self, session_id: str, *, tenant: str) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """Yield the events of a session from the first one until it rests. Raises AgentNotFound."""
        ends = {"agent.session.idle", "agent.session.failed"}
        async with aclosing(self._read(_ref(session_id, tenant), 0, ends.__contains__)) as batches:
            async for events in batches:
                yield events

    async def _read(
        self, ref: SessionRef, first: int, ends_with: Callable[[str], bool]
    ) -> AsyncGenerator[Sequence[LoggedEvent]]:
        log = Log(ref.id, ref.event_prefix, ref.session_key, ends_with, has_many_writers=True)
        batch = await self._store.logs.find_batch(ref.event_prefix, first)
        if batch is None or batch[1] < first:
            state = (await self._store.load(ref)).state
            if first < state.events:
                raise InvalidRequest(
                    "The events after that one are no longer stored: read the items.", param="starting_after"
                )
            batch = first, first
        async with aclosing(self._store.logs.read(log, first, batch[0])) as batches:
            async for events in batches:
                yield events


def _ref(session_id: str, tenant: str) -> SessionRef:
    return SessionRef(tenant, record_id(session_id))


def _model_of(agent: object) -> Json:
    """Return the model of an agent, if it is set."""
    model = getattr(agent, "model", "")
    return {"model": model} if model else {}


def _list_messages(request: CreateSession) -> list[Json]:
    if not request.input and (isinstance(request.environment, NoEnvironment) or request.stream):
        raise InvalidRequest(
            "A session without an environment, or with a stream, needs input.", param="input", code="invalid_value"
        )
    if not request.input:
        return []
    if isinstance(request.input, str):
        return [{"content": [{"type": "input_text", "text": request.input}]}]
    return messages_to_json(request.input)


def messages_to_json(messages: Sequence[SessionMessage]) -> list[Json]:
    """Return messages as items have them."""
    return [{"content": [part.model_dump() for part in message.content]} for message in messages]
