"""The SDK's client for a stack that a test serves."""

from typing import Any, Final

import httpx2
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TLS: Final = httpx2.create_ssl_context()
"""One for all clients: reading the certificates takes 20 ms, and the suite makes a thousand clients."""


def sdk_client(url: str, key: str = "none", **options: Any) -> AsyncOpenAI:
    """A client of the stack at `url`, which has no /v1. It does not retry unless `options` say so."""
    transport = DefaultAsyncHttpxClient(verify=TLS)
    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, http_client=transport, **{"max_retries": 0, "timeout": 30, **options}
    )
