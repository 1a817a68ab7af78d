"""The SDK's client for a stack that a test serves."""

from typing import Final

import httpx2
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TLS: Final = httpx2.create_ssl_context()
"""One for all clients: reading the certificates takes 20 ms, and the suite makes a thousand clients."""


def sdk_client(url: str, key: str = "none", *, max_retries: int = 0, timeout_s: float = 30) -> AsyncOpenAI:
    """A client of the stack at `url`, which has no /v1."""
    return AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=max_retries,
        timeout=timeout_s,
        http_client=DefaultAsyncHttpxClient(verify=TLS),
    )
