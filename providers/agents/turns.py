"""TurnQueue: drives the turns of sessions. Any worker can go on where another one ended.

A turn's worker begins a response, follows its events, and writes each of them to the session's log in the step that
notes how far it has read. So after a worker's end the next one goes on after the last event that was written.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final

import orjson
from openai.types.responses import Response

from apis.agents.sessions import MAX_WAITING_BYTES
from apis.batches.batches import BatchOwner, RequestExecutor
from apis.errors import AgentNotFound, InvalidRequest, NotFound, RateLimited, StackError, StorageCorrupt, Unsupported
from apis.events import LoggedEvent, ResponseEvent
from apis.fair_share import FairShare
from apis.responses import Responses
from apis.storage.keys import new_response_id
from apis.storage.kv_store import Delete
from apis.storage.records import scan_all
from apis.vaults.vaults import Vaults
from apis.wire.base import sdk_model_to_python
from providers.agents.agent_secrets import AgentSecrets
from providers.agents.descriptions import build_request_fields
from providers.agents.environments.artifacts import ArtifactRecord, publish
from providers.agents.environments.hosted import WAITS, HostedEnvironments, build_shell_tool
from providers.agents.output import apply_event, complete_items, is_shown
from providers.agents.records import JOB_PREFIX, Json, SessionRef, TokenSums
from providers.agents.store import HeldSession, SessionStore
from providers.agents.subagents.calls import SubagentCalls
from providers.agents.subagents.tools import build_tools
from providers.agents.transition import Transition
from providers.common.jobs import Claim, Job, JobQueue, JobRecord
from providers.common.state.scan import report_damaged

_log = logging.getLogger(__name__)
_ENDPOINT: Final = "/v1/responses"
_MAX_FAILURES: Final = 2
"""Responses of a turn in a row that may be lost with their server or its upstream until the turn fails."""
_MAX_WAIT_S: Final = 3600
"""Seconds that a turn may wait for the beginning of a response, where there is no room for it."""
_POISON_CODES: Final = frozenset({"invalid_prompt", "context_length_exceeded"})
_TURN_CODES: Final = {
    "context_length_exceeded": "context_length_exceeded",
    "rate_limit_exceeded": "rate_limit_exceeded",
    "insufficient_quota": "project_spend_limit_exceeded",
    "api_key_revoked": "authentication_error",
    "invalid_api_key": "authentication_error",
    "model_not_found": "resource_not_found",
    "overloaded": "server_overloaded",
    "server_error": "server_error",
    "storage_unavailable": "server_error",
}
"""Codes of a turn's error by those of responses and requests."""
_POISON_STATUSES: Final = frozenset({400, 413})
"""Refusals that the same inputs would meet again."""
_END_EVENTS: Final = frozenset(("response.completed", "response.incomplete", "response.failed", "response.cancelled"))
_LOST_OUTPUT: Final = "The output was lost: the turn that read it failed."

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

    async def list_waiting(self) -> AsyncGenerator[Job[SessionRef]]:
        async with aclosing(scan_all(self.kv, JOB_PREFIX)) as rows:
            async for key, entry in rows:
                tenant, _, name = key.removeprefix(JOB_PREFIX).partition("/")
                ref = SessionRef.parse(tenant, name)
                yield Job(tenant, ref, ref.lease_key, self._lease_s, key, entry)

    async def run(self, claim: _Claim) -> None:
        """Drive the turn until it ends, or waits for the client."""
        ref = claim.subject
        session = HeldSession(self._store, ref)
        try:
            while await self._drive(session, claim):
                claim.lease.check()
        except AgentNotFound:
            if self.end_deletion is not None:
                await self.end_deletion(SessionRef(ref.tenant, ref.id))
            await self.kv.write([Delete(ref.job_key)])
        except StorageCorrupt as exc:
            report_damaged(self.kv, ref.state_key, "SessionState, or a part of its turn", exc)
            failure = _Failure("internal_error", exc.message)
            failure.inputs = []
            with suppress(StorageCorrupt):  # the session stays as it is until its record is restored or deleted
                await self._store.change(ref, failure)
            if ref.subagent_id:
                with suppress(StorageCorrupt, AgentNotFound):
                    await self._store.change(SessionRef(ref.tenant, ref.id), partial(_give_up, ref.subagent_id))
            await self.kv.write([Delete(ref.job_key)])

    async def fail(self, claim: _Claim, lost_workers: int) -> None:
        why = f"{lost_workers} processes ended while they drove it" if lost_workers else "no process could end it"
        try:
            await self._store.change(claim.subject, _Failure("internal_error", f"The turn failed: {why}."))
        except AgentNotFound:  # its deletion is left to the client
            await self.kv.write([Delete(claim.subject.job_key)])

    async def _drive(self, holder: HeldSession, claim: _Claim) -> bool:
        """Begin or follow the present response of the turn; return False if nothing is left to do."""
        ref, session, is_new = holder.ref, await holder.load(), False
        turn = session.state.turn
        if turn is None or turn.status != "in_progress":
            await self._store.change(ref, _remove_job)
            return False
        if not turn.response_id:
            if not turn.is_cancelling and any(each.kind == "subagent_call" for each in turn.actions):
                changed = await self._calls.answer_next(holder)
                return changed is not None and _is_working(changed)
            if not turn.is_cancelling and (why := await self._connect(session)):
                if why == WAITS:
                    return False
                changed = await holder.change(_Failure("sandbox_error", why))
                return changed is not None and _is_working(changed)
            chosen = await holder.change(_choose_response)
            if chosen is None or not _is_working(chosen) or not chosen.turn.response_id:
                return chosen is not None and _is_working(chosen)
            session, turn, is_new = chosen, chosen.turn, True
        response_id = turn.response_id
        if not turn.is_started and (is_new or not await self._exists(response_id, ref)):
            claim.lease.check()
            if not await self._begin_response(session, holder):
                return False
        last = await self._follow(holder, response_id, turn.last_event)
        final = await self._load_final(ref, response_id)
        is_whole = final is not None and final.status == "completed"
        copies = await self._save(holder, with_outputs=is_whole)
        changed = await holder.change(_End(self._store, response_id, final, copies, last))
        return changed is not None and _is_working(changed)

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

    async def _begin_response(self, session: Transition, holder: HeldSession) -> bool:
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
        error: Json = orjson.loads(answer.body)["error"]
        if answer.is_transient and session.now - turn.chosen_at < _MAX_WAIT_S:
            raise RateLimited(str(error["message"]), retry_after_s=answer.retry_after_s)
        code = _TURN_CODES.get(error.get("code") or "", "invalid_request")
        failure = _Failure(code, error["message"], turn.response_id)
        failure.inputs = _answers_only(inputs) if answer.status in _POISON_STATUSES else None
        changed = await holder.change(failure)
        return changed is not None and _is_working(changed)

    async def _follow(self, holder: HeldSession, response_id: str, last_event: int) -> "_Shown | None":
        """Show the events of the response from the one after `last_event` on, until it ends. Return the last of them,
        where they are to be shown in the step that ends the response."""
        is_cancelled = is_ending = False
        with suppress(InvalidRequest, NotFound):  # its log is too old, or it was deleted: its end is in the store
            async with aclosing(self._responses.follow(response_id, last_event, tenant=holder.ref.tenant)) as batches:
                async for batch in batches:
                    if not batch:
                        continue
                    events = _Shown(response_id, batch)
                    # the last events of a session with an environment are shown before its outputs are copied
                    if events.is_end and not (await holder.load()).record.environment_id:
                        return events
                    session = await holder.change(events) or await holder.refresh()
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

    async def _load_final(self, ref: SessionRef, response_id: str) -> Response | None:
        """Return the response at its end; None if it was deleted. Raises StackError while it has not ended."""
        try:
            final = await self._responses.get(response_id, tenant=ref.tenant)
        except NotFound:
            return None
        if final.status in ("queued", "in_progress"):
            raise StackError(f"The stream of response {response_id} ended before the response.")
        return final


def _is_working(session: Transition) -> bool:
    turn = session.state.turn
    return turn is not None and turn.status == "in_progress"


async def _remove_job(session: Transition) -> bool:
    """Remove the job of a session whose turn does not work."""
    if _is_working(session):
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


class _Shown:
    """Shows a batch of the response's events, unless they have been shown. `is_end` is true for the last batch."""

    def __init__(self, response_id: str, batch: Sequence[ResponseEvent]) -> None:
        self._response_id = response_id
        self._batch = [event for event in batch if isinstance(event, LoggedEvent)]
        self.is_end = bool(self._batch) and self._batch[-1].type in _END_EVENTS

    async def __call__(self, session: Transition) -> bool:
        turn = session.state.turn
        if turn is None or turn.response_id != self._response_id:
            return False
        is_new = False
        for event in filter(is_shown, self._batch):
            fields: Json = orjson.loads(event.data)
            if fields["sequence_number"] > turn.last_event:
                apply_event(session, fields)
                turn.last_event, turn.is_started, is_new = fields["sequence_number"], True, True
        return is_new


class _Failure:
    """Ends the turn with an error, unless another response of it has begun. Its next one reads `inputs` instead of what
    this one was to read, where they are set."""

    def __init__(self, code: str, message: str, response_id: str | None = None) -> None:
        self._error = {"code": code, "message": message}
        self._response_id = response_id
        self.inputs: list[Json] | None = None

    async def __call__(self, session: Transition) -> bool:
        turn = session.state.turn
        if turn is None or self._response_id not in (None, turn.response_id):
            return False
        if self.inputs is not None:
            session.keep_inputs(self.inputs)
        session.end_turn("failed", self._error)
        return True


class _End:
    """Ends the present response of the turn, and decides how the turn goes on."""

    def __init__(
        self,
        store: SessionStore,
        response_id: str,
        final: Response | None,
        copies: Mapping[str, ArtifactRecord],
        last: _Shown | None,
    ) -> None:
        """A turn that is completed has the `copies` of its outputs as artifacts. `last` are events to be shown
        before."""
        self._last = last
        self._store = store
        self._copies = copies
        self._response_id = response_id
        self._final = final
        self._items: list[Json] = [] if final is None else [sdk_model_to_python(item) for item in final.output]

    async def __call__(self, session: Transition) -> bool:
        turn, final = session.state.turn, self._final
        if turn is None or turn.response_id != self._response_id:
            return False
        if self._last is not None:
            await self._last(session)
        complete_items(session, self._items)
        if final is not None and final.usage is not None:
            session.add_usage(_sum_usage(final))
        if final is not None and final.status in ("completed", "incomplete"):
            session.keep_inputs(())
        else:
            await self._keep_inputs(session)
        turn.response_id, turn.has_commands = "", False
        self._go_on(session)
        return True

    def _go_on(self, session: Transition) -> None:
        turn, final = session.turn, self._final
        if turn.is_cancelling or final is None or final.status == "cancelled":
            session.end_turn("cancelled")
        elif final.status == "failed" and (self._error_code() != "server_error" or turn.failures >= _MAX_FAILURES):
            message = final.error.message if final.error is not None else "The response failed."
            session.end_turn(
                "failed", {"code": _TURN_CODES.get(self._error_code(), "invalid_request"), "message": message}
            )
        elif final.status == "incomplete" and not self._is_steered():
            reason = final.incomplete_details.reason if final.incomplete_details is not None else None
            code = "max_output_tokens" if reason == "max_output_tokens" else "invalid_request"
            session.end_turn("failed", {"code": code, "message": f"The response is incomplete: {reason}."})
        else:
            turn.failures = turn.failures + 1 if final.status == "failed" else 0
            if any(each.kind == "subagent_call" for each in turn.actions):
                return  # the worker answers these before the turn goes on, or waits
            if turn.actions:
                session.wait()
            elif final.status == "completed" and session.state.input_first == session.state.input_next:
                publish(session, self._copies)
                session.end_turn("completed")

    def _is_steered(self) -> bool:
        """Return True if the response has ended because input came for the turn."""
        details = self._final.incomplete_details if self._final is not None else None
        return details is not None and details.reason == "steered"

    def _error_code(self) -> str:
        error = self._final.error if self._final is not None else None
        return error.code if error is not None else "server_error"

    async def _keep_inputs(self, session: Transition) -> None:
        """Let the next response read what this one has read, and what it has said until its end, because neither is in
        the conversation. What no model can read is left out."""
        read = await self._store.read_inputs(session)
        if self._error_code() in _POISON_CODES and self._final is not None and self._final.status == "failed":
            inputs = _answers_only(read)
        else:
            inputs = [*_list_started(self._items), *read, *_list_finished(self._items)]
            if sum(len(orjson.dumps(item)) for item in inputs) > MAX_WAITING_BYTES:
                inputs = _answers_only(read)
        session.keep_inputs(inputs)


def _list_finished(items: Sequence[Json]) -> list[Json]:
    """Return the items that are whole, and no call of the shell without its output."""
    finished = [item for item in items if item.get("status") in (None, "completed")]
    answered = {item["call_id"] for item in finished if item["type"] == "shell_call_output"}
    return [item for item in finished if item["type"] != "shell_call" or item["call_id"] in answered]


def _list_started(items: Sequence[Json]) -> list[Json]:
    """Return the approved calls that did not succeed. Before the approval, they keep it from making them again."""
    return [
        item
        for item in items
        if item["type"] == "mcp_call" and item.get("approval_request_id") and item.get("status") != "completed"
    ]


def _answers_only(items: Sequence[Json]) -> list[Json]:
    """Return the answers to calls of the conversation, each with a short output."""
    own_calls = {item.get("call_id") for item in items if item["type"] == "function_call"}
    answers: list[Json] = []
    for item in items:
        if item["type"] == "function_call_output" and item["call_id"] not in own_calls:
            answers.append({**item, "output": _LOST_OUTPUT})
        elif item["type"] == "mcp_approval_response":
            answers.append(item)
    return answers


def _sum_usage(response: Response) -> TokenSums:
    usage: Any = response.usage
    return TokenSums(
        usage.input_tokens,
        usage.input_tokens_details.cached_tokens,
        usage.output_tokens,
        usage.output_tokens_details.reasoning_tokens,
    )
