"""Deliveries: an invocation of an automation becomes a session, a message of one, or a response."""

from contextlib import suppress
from typing import Any, Final, Literal

import msgspec
import orjson

from apis.agents.automations import ExistingSessionTarget, NewSessionTarget, ResponseTarget
from apis.agents.sessions import MessageEvent, RequestKey, SendEvents, SessionMessage
from apis.batches.batches import BatchOwner, RequestExecutor
from apis.errors import NotFound, Overloaded, RateLimited, StackError, StoreUnavailable
from apis.responses import Responses
from apis.wire.base import dump_sent
from providers.agents.activity import SessionActivity
from providers.agents.sessions import StoredSessions
from providers.agents.targets import Target, build_session_request

_RESPONSES: Final = "/v1/responses"
_RETRY_S: Final = 10.0
_BUSY_S: Final = 5.0
"""Seconds until a session that works is looked at again."""


class Delivery(msgspec.Struct, frozen=True):
    """The end of an attempt to deliver an invocation. After `waiting`, it is tried again in `retry_s`; after `failed`
    with `pauses`, the automation rests, because no later invocation would succeed."""

    status: Literal["completed", "failed", "waiting"]
    session_id: str | None = None
    response_id: str | None = None
    code: str = ""
    message: str = ""
    retry_s: float = _RETRY_S
    pauses: bool = False


class TargetDeliverer:
    """Delivers invocations to sessions, and as responses of an executor."""

    def __init__(
        self, sessions: StoredSessions, activity: SessionActivity, responses: Responses, executor: RequestExecutor
    ) -> None:
        self._sessions = sessions
        self._activity = activity
        self._responses = responses
        self._executor = executor

    async def deliver(self, invocation_id: str, target: Target, owner: BatchOwner) -> Delivery:
        """Deliver an invocation of a target with the rights of the owner's key; a repeated delivery of one has no
        effect. Raises StoreUnavailable."""
        try:
            if isinstance(target, NewSessionTarget):
                return await self._create_session(invocation_id, target, owner)
            if isinstance(target, ExistingSessionTarget):
                return await self._send_instructions(invocation_id, target, owner)
            return await self._create_response(invocation_id, target, owner)
        except StoreUnavailable:
            raise
        except (Overloaded, RateLimited) as exc:
            return Delivery("waiting", retry_s=exc.retry_after_s or _BUSY_S)
        except StackError as exc:
            return Delivery("failed", code=exc.code or exc.type, message=exc.message)

    async def _create_session(self, invocation_id: str, target: NewSessionTarget, owner: BatchOwner) -> Delivery:
        request = build_session_request(target)
        session = await self._sessions.create(
            request,
            await self._sessions.resolve_agent(request, tenant=owner.tenant),
            tenant=owner.tenant,
            key_id=owner.key_id,
            key=RequestKey(invocation_id, ""),
        )
        return Delivery("completed", session_id=session["id"])

    async def _send_instructions(
        self, invocation_id: str, target: ExistingSessionTarget, owner: BatchOwner
    ) -> Delivery:
        try:
            session = await self._sessions.get(target.session_id, tenant=owner.tenant)
        except NotFound as exc:
            return Delivery("failed", code="session_not_found", message=exc.message, pauses=True)
        if session["status"] == "failed":
            return Delivery("failed", code="session_failed", message="The session has failed.", pauses=True)
        if session["status"] != "idle":
            return Delivery("waiting", session_id=session["id"], retry_s=_BUSY_S)
        content: list[Any] = [{"type": "input_text", "text": target.instructions}]
        message = SessionMessage.model_validate({"role": "user", "content": content})
        event = MessageEvent(type="agent.session.input.message", input=[message])
        key = RequestKey(invocation_id, "")
        sent = SendEvents(events=[event])
        await self._activity.send(target.session_id, sent, tenant=owner.tenant, key_id=owner.key_id, key=key)
        return Delivery("completed", session_id=target.session_id)

    async def _create_response(self, invocation_id: str, target: ResponseTarget, owner: BatchOwner) -> Delivery:
        request = target.request.model_copy(update={"background": True, "store": True, "stream": None})
        body = orjson.dumps(dump_sent(request))
        response_id = f"resp_{invocation_id.partition('_')[2]}"
        with suppress(NotFound):  # a worker has begun it, and ended before it could note that
            await self._responses.get(response_id, tenant=owner.tenant)
            return Delivery("completed", response_id=response_id)
        answer = await self._executor.execute(_RESPONSES, body, owner=owner, response_id=response_id)
        if answer.status < 400:
            return Delivery("completed", response_id=response_id)
        if answer.is_transient:
            return Delivery("waiting", retry_s=answer.retry_after_s or _BUSY_S)
        error = orjson.loads(answer.body)["error"]
        return Delivery("failed", code=error.get("code") or error["type"], message=error["message"])
