"""StoredWebhookEndpoints: the webhooks that tenants create while the server runs, in a KVStore.

    TENANT/webhook_endpoint/ID    the endpoint with its secret, by which its events are signed

The events of an endpoint wait in the queue `TENANT~ID` (`queue.py`); no tenant's name contains a tilde.
"""

import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from apis.documents.fetcher import Fetcher
from apis.errors import InvalidRequest, NotFound, RateLimited
from apis.fair_share import FairShare
from apis.storage.keys import MAX_RECORD_ID_CHARS, new_id_key
from apis.storage.kv_store import Entry, KVStore
from apis.storage.pages import Page
from apis.storage.records import decode_record, delete_all
from apis.webhooks import (
    OLD_SECRET_LIFE_S,
    WEBHOOK_EVENTS,
    CreateWebhookEndpoint,
    UpdateWebhookEndpoint,
    WebhookEndpoint,
    WebhookEndpointPage,
    check_event_types,
)
from providers.common.state.scan import list_page, skipping_damaged
from providers.common.state.tenant_records import TenantRecords
from providers.webhooks.receivers import SECRET_PREFIX, Webhook, build_event_json, webhook_queue_prefix
from providers.webhooks.sending import post_event

_SECRET_BYTES: Final = 32
_SHOWN_CHARS: Final = 4
_SAMPLE_IDS: Final[Mapping[str, str]] = {
    "response": "resp_sample",
    "batch": "batch_sample",
    "agent.session": "sess_sample",
    "agent.environment": "env_sample",
}
"""Ids of the objects of sample events, by the beginning of the type of the event, before its last dot."""
_SAMPLE_ACTION: Final = {"required_action": {"type": "function_call"}}
_SAMPLE_DATA: Final[Mapping[str, Mapping[str, object]]] = {
    **{name: {"environment_type": "none"} for name in WEBHOOK_EVENTS if name.startswith("agent.session.")},
    "agent.session.action_required": _SAMPLE_ACTION,
}
"""Data of sample events besides the id, by their types."""


class WebhookEndpointOptions(BaseModel):
    """Webhooks that tenants create at `/v1/webhook_endpoints`: at most `max_per_tenant` each, no route with 0. With
    `private`, their hosts may be in private networks, with any port, and URLs may begin with http://; that lets every
    tenant send requests into the network of the server. The other fields are as in `webhooks`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_per_tenant: int = Field(default=20, ge=0, le=1000)
    private: bool = False
    timeout_s: float = Field(default=10, gt=0, le=60)
    retry_s: float = Field(default=5, gt=0, le=3600)
    max_age_s: float = Field(default=3 * 86_400, gt=0, le=30 * 86_400)


DEFAULT_OPTIONS: Final = WebhookEndpointOptions()


class EndpointRecord(msgspec.Struct, frozen=True):
    """A stored endpoint. Until `old_secret_until`, in seconds of Unix time, `old_secret` signs too."""

    id: str
    name: str
    url: str
    event_types: tuple[str, ...]
    secret: str
    created_at: int
    updated_at: int
    old_secret: str = ""
    old_secret_until: float = 0


@dataclass(frozen=True, slots=True)
class EndpointQueue:
    """The webhook of an endpoint, and the name of the queue of its events."""

    name: str
    webhook: Webhook


class StoredWebhookEndpoints:
    """Endpoints as records of their tenants. `places` bounds the requests that are sent at a time. A change holds for
    every event that happens after it has returned, on all workers.

    Events go on through the same queue as those for the webhooks of the run config: signed by Standard Webhooks,
    repeated until they are accepted or too old, never to an address that the fetcher refuses. Every method raises
    NotFound for an id that the tenant does not have, and StoreUnavailable.
    """

    def __init__(self, kv: KVStore, fetcher: Fetcher, places: FairShare, options: WebhookEndpointOptions) -> None:
        self._kv = kv
        self._fetcher = fetcher
        self._places = places
        self._options = options
        self._records = TenantRecords(kv, "webhook_endpoint", EndpointRecord, _not_found)

    async def create(self, request: CreateWebhookEndpoint, *, tenant: str) -> tuple[WebhookEndpoint, str]:
        """Create an endpoint; return it and its secret, which is returned this once. Raises InvalidRequest for an event
        or a URL that is not possible, and for more endpoints than a tenant may have."""
        self._check_url(request.url)
        event_types, now = check_event_types(request.event_types), int(time.time())
        await self._kv.require_room(tenant)
        secret = _new_secret()
        record = EndpointRecord(f"we_{new_id_key()}", request.name, request.url, event_types, secret, now, now)
        await self._records.create(tenant, record.id, record, self._options.max_per_tenant, self._build_error)
        return _summarize(record), secret

    async def get(self, endpoint_id: str, *, tenant: str) -> WebhookEndpoint:
        """Return the endpoint."""
        return _summarize(await self._records.load(tenant, endpoint_id))

    async def list_endpoints(self, page: WebhookEndpointPage, *, tenant: str) -> Page[WebhookEndpoint]:
        """Return a page of the tenant's endpoints, newest first."""
        prefix = self._records.key(tenant, "")
        before = self._records.key(tenant, page.after) if page.after else ""
        rows = await list_page(self._kv, prefix, EndpointRecord, before, order="desc", limit=page.limit)
        return rows.map(lambda row: _summarize(row.record))

    async def update(self, endpoint_id: str, update: UpdateWebhookEndpoint, *, tenant: str) -> WebhookEndpoint:
        """Change the endpoint; events that wait for it go to its new URL. Raises InvalidRequest as `create`."""
        changes = update.model_dump(exclude_none=True)
        if update.url is not None:
            self._check_url(update.url)
        if update.event_types is not None:
            changes["event_types"] = check_event_types(update.event_types)

        def change(record: EndpointRecord) -> EndpointRecord:
            changed = msgspec.structs.replace(record, **changes)
            return record if changed == record else msgspec.structs.replace(changed, updated_at=int(time.time()))

        return _summarize(await self._records.change(tenant, endpoint_id, change))

    async def delete(self, endpoint_id: str, *, tenant: str) -> None:
        """Delete the endpoint with the events that wait for it."""
        await self._records.delete(tenant, endpoint_id)
        await delete_all(self._kv, webhook_queue_prefix(_queue_name(tenant, endpoint_id)))

    async def rotate_secret(self, endpoint_id: str, *, keep_old: bool, tenant: str) -> tuple[WebhookEndpoint, str]:
        """Replace the secret; return the endpoint and the new secret. With `keep_old`, events have a second signature
        by the old one for OLD_SECRET_LIFE_S."""
        secret, now = _new_secret(), time.time()

        def change(record: EndpointRecord) -> EndpointRecord:
            old, until = (record.secret, now + OLD_SECRET_LIFE_S) if keep_old else ("", 0.0)
            return msgspec.structs.replace(
                record, secret=secret, old_secret=old, old_secret_until=until, updated_at=int(now)
            )

        return _summarize(await self._records.change(tenant, endpoint_id, change)), secret

    async def send_test(self, endpoint_id: str, event_type: str, *, tenant: str) -> int:
        """Send a sample event now, once; return the status code of the answer. Raises InvalidRequest if there is no
        answer, and RateLimited while the tenant's share of the deliveries is in use."""
        check_event_types([event_type], "event_type")
        record = await self._records.load(tenant, endpoint_id)
        place = self._places.try_acquire(tenant)
        if place is None:
            raise RateLimited("Too many webhook deliveries are under way.", retry_after_s=1)
        with place:
            sample_id = _SAMPLE_IDS[event_type.rpartition(".")[0]]
            body = build_event_json(event_type, sample_id, int(time.time()), _SAMPLE_DATA.get(event_type))
            hook = self._to_webhook(tenant, record)
            attempt = await post_event(self._fetcher, hook, f"wh_{secrets.token_hex(16)}", body)
        if attempt.status_code is None:
            raise InvalidRequest(
                f"The endpoint did not answer: {attempt.error}", param="webhook_endpoint_id", code="no_answer"
            )
        return attempt.status_code

    async def list_queues(self, tenant: str) -> list[EndpointQueue]:
        """Return the queues of all endpoints of the tenant that can be read: a damaged one gets no events, and stops
        nothing that ends with an event."""
        rows = await self._kv.scan(self._records.key(tenant, ""), limit=self._options.max_per_tenant + 1)
        queues: list[EndpointQueue] = []
        for key, entry in rows:
            with skipping_damaged(self._kv, key, EndpointRecord.__name__):
                queues.append(self._to_queue(tenant, entry))
        return queues

    async def find_queue(self, name: str) -> EndpointQueue | None:
        """Return the queue of that name; None if no endpoint has it, or no longer."""
        tenant, _, endpoint_id = name.partition("~")
        entry = await self._kv.get(self._records.key(tenant, endpoint_id)) if endpoint_id else None
        return None if entry is None else self._to_queue(tenant, entry)

    def _to_queue(self, tenant: str, entry: Entry) -> EndpointQueue:
        record = decode_record(entry, EndpointRecord)
        return EndpointQueue(_queue_name(tenant, record.id), self._to_webhook(tenant, record))

    def _to_webhook(self, tenant: str, record: EndpointRecord) -> Webhook:
        old_secret = record.old_secret if time.time() < record.old_secret_until else None
        fields = self._options.model_dump(exclude={"max_per_tenant"})
        return Webhook.model_validate(
            {
                **fields,
                "url": record.url,
                "secret": record.secret,
                "old_secret": old_secret or None,
                "events": record.event_types,
                "tenant": tenant,
            }
        )

    def _build_error(self, _count: int) -> InvalidRequest:
        bound = self._options.max_per_tenant
        return InvalidRequest(f"A project has at most {bound} webhook endpoints.", code="too_many_webhook_endpoints")

    def _check_url(self, url: str) -> None:
        if not self._options.private and not url.startswith("https://"):
            raise InvalidRequest("The URL of a webhook begins with https://.", param="url", code="invalid_value")


def _summarize(record: EndpointRecord) -> WebhookEndpoint:
    hint = f"{SECRET_PREFIX}...{record.secret[-_SHOWN_CHARS:]}"
    types: Sequence[str] = record.event_types
    return WebhookEndpoint(record.id, record.name, record.url, tuple(types), hint, record.created_at, record.updated_at)


def _new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def _not_found(endpoint_id: str) -> NotFound:
    return NotFound(f"No webhook endpoint found with id '{endpoint_id[:MAX_RECORD_ID_CHARS]}'.")


def _queue_name(tenant: str, endpoint_id: str) -> str:
    return f"{tenant}~{endpoint_id}"
