"""Cache salts: they separate the prompts of tenants in an engine's prefix cache, where timing would reveal them."""

import hashlib
import hmac
from functools import lru_cache
from typing import Final, TypeVar

from apis.chat import TENANT_SALT_PREFIX, ChatRequest
from apis.completion import CompletionRequest
from apis.decisions import DecisionRequest
from apis.responses import CompactConversation, CreateResponse
from stack.server_config import HttpServerConfig

_MAX_SHARES: Final = 10_000
"""Tenants whose share is remembered: it takes some microseconds to compute."""
RequestT = TypeVar("RequestT", ChatRequest, CompactConversation, CompletionRequest, CreateResponse, DecisionRequest)


class CacheSalts:
    """One salt per tenant, equal on all workers of a config. A client's own salt only divides its tenant's cache: the
    salt begins with the tenant's share (`apis.chat.share_of_salt`) all the same.

    The key is derived from `secret`, which stored accounts have, or from all API keys; no tenant knows it: none can
    compute another's salt. A server of one tenant has no one to separate, and passes the client's salt through.
    """

    def __init__(self, config: HttpServerConfig, secret: bytes | None = None) -> None:
        self._key: bytes | None = None
        self._share_of = lru_cache(_MAX_SHARES)(self._compute_share)
        if secret is not None:
            self._key = hashlib.sha256(b"responses-stack cache salt 2" + secret).digest()
        elif len(config.tenants) > 1:
            digests = sorted(
                hashlib.sha256(entry.key.get_secret_value().encode()).digest() for entry in config.api_keys
            )
            self._key = hashlib.sha256(b"responses-stack cache salt 1" + b"".join(digests)).digest()

    def add_salt(self, request: RequestT, tenant: str) -> RequestT:
        """Return the request with its tenant's salt."""
        if self._key is None:
            return request
        salt, client_salt = self.salt_of(tenant), request.cache_salt
        if client_salt:
            salt = f"{self._share_of(tenant)}.{self._digest(f'{tenant}/{client_salt}')}"
        return request.model_copy(update={"cache_salt": salt})

    def salt_of(self, tenant: str) -> str | None:
        """Return the salt of a request without one of the client's; None on a server of one tenant."""
        return None if self._key is None else f"{TENANT_SALT_PREFIX}{self._share_of(tenant)}"

    def _compute_share(self, tenant: str) -> str:
        return self._digest(f"{tenant}/")

    def _digest(self, text: str) -> str:
        assert self._key is not None
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()[:32]
