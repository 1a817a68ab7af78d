"""Webhooks: the receivers of the ends of background responses, and the events they get, signed by Standard Webhooks
(https://github.com/standard-webhooks/standard-webhooks) as the openai SDK's `webhooks.unwrap` verifies them.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, get_args
from urllib.parse import urlsplit

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from apis.webhooks import WebhookEvent

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - a prefix, not a password


def _check_secret(secret: SecretStr) -> SecretStr:
    try:
        key = _secret_bytes(secret)
    except binascii.Error:
        key = b""
    if not secret.get_secret_value().startswith(SECRET_PREFIX) or not 24 <= len(key) <= 64:
        raise ValueError('must be "whsec_" and the base64 of 24 to 64 random bytes, as of: openssl rand -base64 32')
    return secret


_Secret = Annotated[SecretStr, AfterValidator(_check_secret)]


class Webhook(BaseModel):
    """A URL that gets an event by POST when a background response or a batch of the tenant ends. With `private`, the
    host may be in a private network, with any port. A POST may take `timeout_s`; it is repeated, first after `retry_s`,
    then with growing delays, until `max_age_s` after that end. Where `old_secret` is set, events have a second
    signature by it, until every receiver knows `secret`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: str = Field(pattern=r"^https?://[!-~]+$", max_length=2048, repr=False)
    secret: _Secret
    old_secret: _Secret | None = None
    events: tuple[WebhookEvent, ...] = Field(default=get_args(WebhookEvent), min_length=1)
    tenant: str = Field(default="default", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    private: bool = False
    timeout_s: float = Field(default=10, gt=0, le=60)
    retry_s: float = Field(default=5, gt=0, le=3600)
    max_age_s: float = Field(default=3 * 86_400, gt=0, le=30 * 86_400)

    def __str__(self) -> str:
        # the other parts of a URL may be secret
        return urlsplit(self.url).hostname or ""

    @property
    def signing_secrets(self) -> Sequence[SecretStr]:
        """The secrets of which each signs every event."""
        return (self.secret,) if self.old_secret is None else (self.secret, self.old_secret)

    @property
    def queue_name(self) -> str:
        """The name of its queue in the store, which depends on tenant and URL only."""
        return hashlib.sha256(f"{self.tenant}/{self.url}".encode()).hexdigest()[:32]


def build_event_json(event: str, object_id: str, created_at: int, data: Mapping[str, object] | None = None) -> bytes:
    """Return the event of an object, with a new id; `data` is sent with the object's id."""
    fields = {"id": f"evt_{secrets.token_hex(16)}", "object": "event", "created_at": created_at, "type": event}
    return orjson.dumps({**fields, "data": {"id": object_id, **(data or {})}})


def webhook_queue_prefix(queue_name: str) -> str:
    """Return the prefix of the keys of a queue's deliveries; with an empty name, of all queues."""
    return f"/webhook/{queue_name and f'{queue_name}/'}"


def build_signed_headers(
    signing_secrets: Sequence[SecretStr], webhook_id: str, timestamp_s: int, body: bytes
) -> dict[str, str]:
    """Return the headers by which a receiver verifies the body: one signature by each secret, of which it needs one.
    Receivers refuse timestamps older than five minutes."""
    signed = b"%b.%d.%b" % (webhook_id.encode(), timestamp_s, body)
    digests = [hmac.new(_secret_bytes(secret), signed, hashlib.sha256).digest() for secret in signing_secrets]
    return {
        "content-type": "application/json",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
    }


def _secret_bytes(secret: SecretStr) -> bytes:
    return base64.b64decode(secret.get_secret_value().removeprefix(SECRET_PREFIX), validate=True)
