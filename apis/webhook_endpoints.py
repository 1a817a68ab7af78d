"""WebhookEndpoints: the receivers of events that a tenant manages, and the requests that create and change them."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field

from apis.errors import InvalidRequest
from apis.storage.pages import Page
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


class WebhookEndpoints(ABC):
    """Endpoints of all tenants. A change holds for every event that happens after it has returned, on all workers.

    Events go on through the same queue as those for the webhooks of the run config: signed by Standard Webhooks,
    repeated until they are accepted or too old, never to an address that the fetcher refuses. Every method raises
    NotFound for an id that the tenant does not have, and StoreUnavailable.
    """

    @abstractmethod
    async def create(self, request: CreateWebhookEndpoint, *, tenant: str) -> tuple[WebhookEndpoint, str]:
        """Create an endpoint; return it and its secret, which is returned this once. Raises InvalidRequest for an event
        or a URL that is not possible, and for more endpoints than a tenant may have."""

    @abstractmethod
    async def get(self, endpoint_id: str, *, tenant: str) -> WebhookEndpoint:
        """Return the endpoint."""

    @abstractmethod
    async def list_endpoints(self, page: WebhookEndpointPage, *, tenant: str) -> Page[WebhookEndpoint]:
        """Return a page of the tenant's endpoints, newest first."""

    @abstractmethod
    async def update(self, endpoint_id: str, update: UpdateWebhookEndpoint, *, tenant: str) -> WebhookEndpoint:
        """Change the endpoint; events that wait for it go to its new URL. Raises InvalidRequest as `create`."""

    @abstractmethod
    async def delete(self, endpoint_id: str, *, tenant: str) -> None:
        """Delete the endpoint with the events that wait for it."""

    @abstractmethod
    async def rotate_secret(self, endpoint_id: str, *, keep_old: bool, tenant: str) -> tuple[WebhookEndpoint, str]:
        """Replace the secret; return the endpoint and the new secret. With `keep_old`, events have a second signature
        by the old one for OLD_SECRET_LIFE_S."""

    @abstractmethod
    async def send_test(self, endpoint_id: str, event_type: str, *, tenant: str) -> int:
        """Send a sample event now, once; return the status code of the answer. Raises InvalidRequest if there is no
        answer, and RateLimited while the tenant's share of the deliveries is in use."""
