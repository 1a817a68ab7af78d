"""Cache salts: what keeps the tenants' prompts apart in an engine's prefix cache, where timing would tell of them."""

import hashlib
import hmac
from typing import TypeVar

from apis.chat import TENANT_SALT_PREFIX, ChatRequest
from apis.responses import CompactConversation, CreateResponse
from stack.config import HttpServerConfig

RequestT = TypeVar("RequestT", ChatRequest, CompactConversation, CreateResponse)


class CacheSalts:
    """A salt for each tenant, the same on all workers of a config. Whatever a client gives only narrows its own.

    The key is made of all API keys, and no tenant knows all: none can tell another's salt. A server of one tenant has
    nobody to keep apart, and hands on what it is given.
    """

    def __init__(self, config: HttpServerConfig) -> None:
        self._key: bytes | None = None
        if len({entry.tenant for entry in config.api_keys}) > 1:
            digests = sorted(
                hashlib.sha256(entry.key.get_secret_value().encode()).digest() for entry in config.api_keys
            )
            self._key = hashlib.sha256(b"responses-stack cache salt 1" + b"".join(digests)).digest()

    def add_salt(self, request: RequestT, tenant: str) -> RequestT:
        """The request with its tenant's salt."""
        if self._key is None:
            return request
        given = request.cache_salt
        digest = hmac.new(self._key, f"{tenant}/{given or ''}".encode(), hashlib.sha256).hexdigest()[:32]
        return request.model_copy(update={"cache_salt": digest if given else f"{TENANT_SALT_PREFIX}{digest}"})
