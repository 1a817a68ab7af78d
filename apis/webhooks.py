"""Webhooks: the queue of events for receivers elsewhere, and the requests by which tenants manage their receivers."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field

from apis.errors import InvalidRequest
from apis.observation.details import DeliverySummary
from apis.provider import Provider
from apis.storage.kv_store import Op
from apis.wire.base import Wire

WebhookEvent = Literal[
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "agent.session.created",
    "agent.session.in_progress",
    "agent.session.idle",
    "agent.session.failed",
    "agent.session.action_required",
    "agent.environment.ready",
    "agent.environment.failed",
    "agent.environment.suspended",
    "agent.environment.expired",
]
WEBHOOK_EVENTS: Final[tuple[str, ...]] = get_args(WebhookEvent)
"""The types of events that webhooks get here."""
OLD_SECRET_LIFE_S: Final = 24 * 3600
"""Seconds for which the previous secret signs too, where a rotation asks for that."""


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host or not url.startswith(("https://", "http://")) or not re.fullmatch("[!-~]+", url):
        raise ValueError("must be a URL that begins with https:// and has a host")
    return url


_Url = Annotated[str, Field(max_length=2048), AfterValidator(_check_url)]
_EventTypes = Annotated[list[str], Field(min_length=1, max_length=64)]


class CreateWebhookEndpoint(Wire):
    """Body that creates an endpoint."""

    name: str = Field(min_length=1, max_length=256)
    url: _Url
    event_types: _EventTypes


class UpdateWebhookEndpoint(Wire):
    """Body that changes an endpoint; fields that are absent stay."""

    name: str | None = Field(default=None, min_length=1, max_length=256)
    url: _Url | None = None
    event_types: _EventTypes | None = None


class RotateWebhookSecret(Wire):
    """Body that replaces the secret of an endpoint."""

    keep_old_secret_active_for_24_hours: bool | None = None


class SendTestEvent(Wire):
    """Body that sends a sample event to an endpoint."""

    event_type: str = Field(max_length=64)


class WebhookEndpointPage(BaseModel):
    """Query of the listing of endpoints, newest first."""

    after: str | None = Field(default=None, max_length=256)
    limit: int = Field(default=20, ge=1, le=100)


@dataclass(frozen=True, slots=True)
class WebhookEndpoint:
    """An endpoint without its secret, of which `secret_hint` shows the end. Times are seconds of Unix time."""

    id: str
    name: str
    url: str
    event_types: tuple[str, ...]
    secret_hint: str
    created_at: int
    updated_at: int


def check_event_types(names: list[str], param: str = "event_types") -> tuple[str, ...]:
    """Return the types of events without repetition. Raises InvalidRequest for one that never happens here."""
    for index, name in enumerate(names):
        if name not in WEBHOOK_EVENTS:
            raise InvalidRequest(
                f"No event '{name[:64]}' happens on this server. Its events are {', '.join(WEBHOOK_EVENTS)}.",
                param=f"{param}[{index}]" if len(names) > 1 else param,
                code="invalid_value",
            )
    return tuple(dict.fromkeys(names))


class Webhooks(Provider, ABC):
    """The webhooks of a stack, for every API that reports an event to them: one of the run config, or one that the
    tenant manages.

    Promises: an event is queued in the write of the change that it reports, delivered at least once under one id, and
    repeated until it is accepted or too old.
    """

    @abstractmethod
    async def event_ops(
        self, event: str, object_id: str, tenant: str, data: Mapping[str, object] | None = None
    ) -> list[Op]:
        """Return the operations that queue the event for the tenant's webhooks: to be written with the change that it
        reports; none for an event that no webhook gets. `data` is sent with the object's id. Raises
        StoreUnavailable."""

    @abstractmethod
    def wake(self, ops: Sequence[Op]) -> None:
        """Send the events that are among these operations, which were written."""

    @abstractmethod
    async def list_deliveries(self, object_id: str, *, tenant: str) -> Sequence[DeliverySummary]:
        """Return the deliveries of the events of an object that can be read, oldest first."""

    @abstractmethod
    async def forget_deliveries(self, object_id: str, *, tenant: str) -> None:
        """Delete the deliveries of an object from the log; those that wait are still sent."""
