"""TurnQueue: drives the turns of sessions. Any worker can go on where another one ended.

A turn's worker begins a response, follows its events, and writes each of them to the session's log in the step that
notes how far it has read. So after a worker's end the next one goes on after the last event that was written.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Final

import orjson

from apis.batches.batches import BatchOwner, RequestExecutor
from apis.errors import AgentNotFound, InvalidRequest, NotFound, RateLimited, StackError, StorageCorrupt, Unsupported
from apis.fair_share import FairShare, Place
from apis.responses import Responses
from apis.storage.keys import new_response_id
from apis.storage.kv_store import Delete, Entry, Op
from apis.storage.records import scan_all
from apis.vaults.vaults import Vaults
from apis.wire.base import sdk_model_to_python
from providers.agents.agent_secrets import AgentSecrets
from providers.agents.descriptions import build_request_fields
from providers.agents.environments.artifacts import ArtifactRecord
from providers.agents.environments.hosted import WAITS, HostedEnvironments, build_shell_tool
from providers.agents.records import Json, SessionRef
from providers.agents.store import HeldSession, SessionStore
from providers.agents.subagents.calls import SubagentCalls
from providers.agents.subagents.tools import build_tools
from providers.agents.transition import Transition
from providers.agents.turn_changes import TURN_CODES, ResponseEnd, ShownEvents, TurnFailure, list_answers
from providers.agents.work import TURN_PREFIX
from providers.common.jobs import Claim, Job, JobQueue, JobRecord, LeasedJobs
from providers.common.state.scan import report_damaged
from providers.common.state.worker_signs import WorkerSign

_log = logging.getLogger(__name__)
_ENDPOINT: Final = "/v1/responses"
_MAX_WAIT_S: Final = 3600
"""Seconds that a turn may wait for the beginning of a response, where there is no room for it."""
_POISON_STATUSES: Final = frozenset({400, 413})
"""Refusals that the same inputs would meet again."""
_CLOSE_TIMEOUT_S: Final = 3.0

_Claim = Claim[SessionRef, JobRecord]


class TurnQueue(JobQueue[SessionRef, JobRecord]):
    """The turns of all sessions that a worker has to drive."""

    title = "turns of sessions"

    def __init__(
        self,
        store: SessionStore,
        responses: Responses,
        executor: RequestExecutor,
        places: FairShare,
        vaults: Vaults | None,
        *,
        lease_s: float,
        retry_s: float,
    ) -> None:
        super().__init__(store.kv, JobRecord, places, retry_s)
        self._vaults = vaults
        self._secrets = AgentSecrets(store.kv, vaults)
        self._store = store
        self.environments: HostedEnvironments | None = None
        """None where this server has no workspaces."""
        self.end_deletion: Callable[[SessionRef], Awaitable[None]] | None = None
        """Deletes what a deleted session has left."""
        self._responses = responses
        self._executor = executor
        self._lease_s = lease_s
        self._calls = SubagentCalls(store, responses)
        self._jobs: LeasedJobs[SessionRef, JobRecord] | None = None
        self._begun: dict[SessionRef, HeldSession] = {}
        """Sessions whose turns this process drives since the write that has let them go on."""

    def start(self, sign: WorkerSign, poll_s: float) -> None:
        """Begin to drive turns under the sign of this process."""
        self._jobs = LeasedJobs(self, sign, poll_s)
        self._jobs.start()
        self._store.drivers = self

    async def close(self) -> None:
        """Drive no more turns: another process goes on with those that have not ended."""
        if self._jobs is not None:
            await self._jobs.close(_CLOSE_TIMEOUT_S)

    def wake(self) -> None:
        if self._jobs is not None:
            self._jobs.wake()

    def reserve(self, session: Transition) -> Place | None:
        place = self._jobs.reserve(self._build_job(session.ref)) if self._jobs is not None and session.goes_on else None
        if place is not None and not session.record.environment_id and not session.turn.actions:
            session.choose_response(new_response_id())
        return place

    async def write(self, session: Transition, ops: Sequence[Op], place: Place) -> list[int] | None:
        assert self._jobs is not None  # it has given the place
        self._begun[session.ref] = HeldSession(self._store, session.ref, session)
        versions = None
        try:
            versions = await self._jobs.start_new(self._build_job(session.ref), JobRecord(), ops, place)
        finally:
            if versions is None:
                del self._begun[session.ref]
        return versions

    def _build_job(self, ref: SessionRef, entry: Entry | None = None) -> Job[SessionRef]:
        return Job(ref.tenant, ref, ref.lease_key, self._lease_s, ref.job_key, entry)

    async def list_waiting(self) -> AsyncGenerator[Job[SessionRef]]:
        async with aclosing(scan_all(self.kv, TURN_PREFIX)) as rows:
            async for key, entry in rows:
                tenant, _, name = key.removeprefix(TURN_PREFIX).partition("/")
                yield self._build_job(SessionRef.parse(tenant, name), entry)

    async def run(self, claim: _Claim) -> None:
        """Drive the turn until it ends, or waits for the client."""
        ref = claim.subject
        begun = self._begun.pop(ref, None)
        session = begun or HeldSession(self._store, ref)
        session.lease = claim.lease
        try:
            is_new = begun is not None
            while await self._drive(session, claim, is_new=is_new):
                claim.lease.check()
                is_new = False
            if not claim.lease.is_relinquished and not (await session.load()).needs_worker:
                await claim.lease.release()  # its job is deleted
        except AgentNotFound:
            if self.end_deletion is not None:
                await self.end_deletion(SessionRef(ref.tenant, ref.id))
            await self.kv.write([Delete(ref.job_key)])
        except StorageCorrupt as exc:
            report_damaged(self.kv, ref.state_key, "SessionState, or a part of its turn", exc)
            failure = TurnFailure("internal_error", exc.message)
            failure.inputs = []
            with suppress(StorageCorrupt):  # the session stays as it is until its record is restored or deleted
                await self._store.change(ref, failure)
            if ref.subagent_id:
                with suppress(StorageCorrupt, AgentNotFound):
                    await self._store.change(SessionRef(ref.tenant, ref.id), partial(_give_up, ref.subagent_id))
            await self.kv.write([Delete(ref.job_key)])

    def on_end(self, claim: _Claim) -> None:
        self._begun.pop(claim.subject, None)

    async def fail(self, claim: _Claim, lost_workers: int) -> None:
        why = f"{lost_workers} processes ended while they drove it" if lost_workers else "no process could end it"
        try:
            await self._store.change(claim.subject, TurnFailure("internal_error", f"The turn failed: {why}."))
        except AgentNotFound:  # its deletion is left to the client
            await self.kv.write([Delete(claim.subject.job_key)])

    async def _drive(self, holder: HeldSession, claim: _Claim, *, is_new: bool) -> bool:
        """Begin or follow the present response of the turn; return False if nothing is left to do. One that `is_new`,
        or is chosen here, was not begun by another process."""
        ref, session = holder.ref, await holder.load()
        turn = session.state.turn
        if turn is None or turn.status != "in_progress":
            await self._store.change(ref, _remove_job)
            return False
        if not turn.response_id:
            if not turn.is_cancelling and any(each.kind == "subagent_call" for each in turn.actions):
                changed = await self._calls.answer_next(holder)
                return changed is not None and changed.needs_worker
            if not turn.is_cancelling and (why := await self._connect(session)):
                if why == WAITS:
                    return False
                changed = await holder.change(TurnFailure("sandbox_error", why))
                return changed is not None and changed.needs_worker
            chosen = await holder.change(_choose_response)
            if chosen is None or not chosen.needs_worker or not chosen.turn.response_id:
                return chosen is not None and chosen.needs_worker
            session, turn, is_new = chosen, chosen.turn, True
        response_id = turn.response_id
        if not turn.is_started and (is_new or not await self._exists(response_id, ref)):
            claim.lease.check()
            if not await self._begin_response(session, holder, claim):
                return False
        last = await self._follow(holder, response_id, turn.last_event)
        final = last.final if last is not None else await self._load_final(ref, response_id)
        is_whole = final is not None and final["status"] == "completed"
        copies = await self._save(holder, with_outputs=is_whole)
        changed = await holder.change(ResponseEnd(self._store, response_id, final, copies, last))
        return changed is not None and changed.needs_worker

    async def _connect(self, session: Transition) -> str:
        """Return "" if the turn can go on in its environment; else WAITS, or why it never can."""
        if not session.record.environment_id:
            return ""
        if self.environments is None:
            return "This server has no environments any more."
        return await self.environments.require_connected(session)

    async def _save(self, holder: HeldSession, *, with_outputs: bool) -> Mapping[str, ArtifactRecord]:
        """Save the workspace of the session, if commands have run in it, and return copies of what the turn has put
        out."""
        session = await holder.load()
        turn = session.state.turn
        if self.environments is None or turn is None:
            return {}
        try:
            if turn.has_commands:
                await self.environments.save(session)
            if turn.has_outputs and with_outputs and not turn.actions and not holder.ref.subagent_id:
                return await self.environments.artifacts.copy_outputs(session)
        except (NotFound, Unsupported) as exc:
            _log.warning("the workspace of a session cannot be read: %s", exc.message)
        return {}

    async def _exists(self, response_id: str, ref: SessionRef) -> bool:
        try:
            await self._responses.get(response_id, tenant=ref.tenant)
        except NotFound:
            return False
        return True

    async def _begin_response(self, session: Transition, holder: HeldSession, claim: _Claim) -> bool:
        """Begin the response that the turn has chosen; return False if the turn fails instead. Raises RateLimited where
        it can begin later."""
        ref, turn = session.ref, session.turn
        inputs = await self._store.read_inputs(session)
        fields: Json = {
            **build_request_fields(await self._secrets.join(session.record.agent, ref.tenant, ref.id)),
            "input": inputs,
            "conversation": session.record.conversation_id,
            "background": True,
            "prompt_cache_key": ref.name,
            "metadata": {"agent_session_id": ref.id, "agent_turn_id": turn.id},
        }
        if ref.subagent_id:
            fields["metadata"]["agent_subagent_id"] = ref.subagent_id
            if not session.state.input_first:
                await self._responses.conversations().require(session.record.conversation_id, tenant=ref.tenant)
        elif tools := build_tools(session.record.agent):
            fields["tools"] = [*fields.get("tools", ()), *tools]
        if session.record.vault_ids and self._vaults is not None:  # deleted ones are of no more use
            fields["vault_ids"] = await self._vaults.list_existing(session.record.vault_ids, tenant=ref.tenant)
        if session.record.environment_id:
            fields["tools"] = [*fields.get("tools", ()), build_shell_tool(session)]
        window = await self._responses.find_window(fields["model"])
        if window is not None:
            fields["context_management"] = [{"type": "compaction", "compact_threshold": max(1, window * 4 // 5)}]
        owner = BatchOwner(ref.tenant, turn.key_id)
        answer = await self._executor.execute(
            _ENDPOINT, orjson.dumps(fields), owner=owner, response_id=turn.response_id
        )
        if answer.status < 400:
            return True
        claim.lease.check()  # else it may be refused because another process has begun it
        error: Json = orjson.loads(answer.body)["error"]
        if answer.is_transient and session.now - turn.chosen_at < _MAX_WAIT_S:
            raise RateLimited(str(error["message"]), retry_after_s=answer.retry_after_s)
        code = TURN_CODES.get(error.get("code") or "", "invalid_request")
        failure = TurnFailure(code, error["message"], turn.response_id)
        failure.inputs = list_answers(inputs) if answer.status in _POISON_STATUSES else None
        changed = await holder.change(failure)
        return changed is not None and changed.needs_worker

    async def _follow(self, holder: HeldSession, response_id: str, last_event: int) -> "ShownEvents | None":
        """Show the events of the response from the one after `last_event` on, until it ends. Return the last of them,
        which may be left to be shown in the step that ends the response; None if they cannot be read."""
        is_cancelled = is_ending = False
        with suppress(InvalidRequest, NotFound):  # its log is too old, or it was deleted: its end is in the store
            async with aclosing(self._responses.follow(response_id, last_event, tenant=holder.ref.tenant)) as batches:
                async for batch in batches:
                    if not batch:
                        continue
                    events = ShownEvents(response_id, batch)
                    # the last events of a session with an environment are shown before its outputs are copied
                    if events.final is not None and not (await holder.load()).record.environment_id:
                        return events
                    session = await holder.change(events) or await holder.refresh()
                    if events.final is not None:
                        return events
                    turn = session.state.turn
                    if turn is None or turn.response_id != response_id:
                        continue
                    if turn.is_cancelling and not is_cancelled:
                        is_cancelled = True
                        await self._responses.cancel(response_id, tenant=holder.ref.tenant)
                    elif session.has_unread_input and not is_ending:
                        is_ending = True
                        await self._responses.end_after_turn(response_id, tenant=holder.ref.tenant)
        return None

    async def _load_final(self, ref: SessionRef, response_id: str) -> Json | None:
        """Return the response at its end; None if it was deleted. Raises StackError while it has not ended."""
        try:
            final = await self._responses.get(response_id, tenant=ref.tenant)
        except NotFound:
            return None
        if final.status in ("queued", "in_progress"):
            raise StackError(f"The stream of response {response_id} ended before the response.")
        return sdk_model_to_python(final)


async def _remove_job(session: Transition) -> bool:
    """Remove the job of a session whose turn does not work."""
    if session.needs_worker:
        return False
    session.delete(session.ref.job_key)
    return True


async def _give_up(subagent_id: str, session: Transition) -> bool:
    summary = session.state.subagents.get(subagent_id)
    if summary is None or not summary.turn_id:
        return False
    session.give_up(subagent_id)
    return True


async def _choose_response(session: Transition) -> bool:
    """Choose the id of the next response of the turn, and the inputs that it reads."""
    turn = session.state.turn
    if turn is None or turn.status != "in_progress" or turn.response_id:
        return False
    if turn.is_cancelling:
        session.end_turn("cancelled")
        return True
    session.choose_response(new_response_id())
    return True
