"""SearchService: the `search` tool over the HTTP API of a search service, with the failures that such APIs have.

Its requests go through an httpx2 client of its own, not the stack's Fetcher: the host is named by the run config, a
connection that stays open saves a TLS handshake per search, and the client can send through a proxy.
"""

import asyncio
import json
import logging
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, cast

import httpx2
from pydantic import ConfigDict, Field, SecretStr

from apis.errors import ConfigError, ToolFailed
from apis.provider import Provider
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime, ToolSpec
from providers.common.net.http.inflater import EncodingError
from providers.common.net.service_client import open_service_client, read_body
from providers.tool_runtime.search_results import (
    SEARCH_TOOL,
    SearchArguments,
    SearchOptions,
    build_sources,
    clean_line,
    render_sources,
    validate_model,
)

_log = logging.getLogger(__name__)

ServiceUrl = Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")]

_MAX_BODY_BYTES: Final = 1024 * 1024
_CONNECT_TIMEOUT_S: Final = 5.0
_STATUS_TEXTS: Final[Mapping[int, str]] = {
    400: "The search service did not accept the search.",
    401: "The search service refused the key.",
    402: "The search service's credits are used up.",
    403: "The search service refused the key.",
    422: "The search service did not accept the search.",
    429: "The search service allows no more searches just now; try again later.",
}


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """HTTP request of one search: a POST of `body` as JSON where there is one, else a GET with `query`."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Mapping[str, Any] | None = None


class SearchService(ToolRuntime):
    """Searches with the service of a subclass. Has no tool while a key that it needs is missing.

    Options of a call: `allowed_domains` and `blocked_domains` (each with its subdomains; also enforced on the results),
    `context_size`, `user_location`, and `live: false`, which forbids live access to the web: a service that cannot
    promise this refuses the search.
    """

    needs_key: ClassVar[bool] = True
    status_texts: ClassVar[Mapping[int, str]] = {}

    class Config(Provider.Config):
        """`tool_timeout_s` bounds a whole search, connecting and reading included. `proxy` is the URL of the proxy to
        send through (http, https; socks5 with the package socksio); without it, an https `base_url` is reached through
        the proxy that HTTPS_PROXY, ALL_PROXY and NO_PROXY name, and an http one directly."""

        model_config = ConfigDict(hide_input_in_errors=True)

        api_key: SecretStr | None = None
        base_url: ServiceUrl
        proxy: SecretStr | None = None
        tool_timeout_s: float = Field(default=30.0, gt=0, le=600)

    def __init__(self, config: Config) -> None:
        self._config = config
        # A key read from an unset environment variable is an empty string.
        self.api_key = (config.api_key.get_secret_value() if config.api_key else "").strip()
        self._client: httpx2.AsyncClient | None = None

    @abstractmethod
    def build_request(self, query: str, options: SearchOptions) -> SearchRequest:
        """Return the request of a search. Raises ToolFailed for an option that the service cannot honour."""

    @abstractmethod
    def parse_results(self, response: Any) -> Any:
        """Return the results in a response, which is any JSON. May raise TypeError, KeyError and AttributeError."""

    @abstractmethod
    def parse_passage(self, result: Mapping[str, Any]) -> str:
        """Return the text of a result that describes its page."""

    async def start(self) -> None:
        if not re.fullmatch(r"[\x21-\x7e]*", self.api_key):
            raise ConfigError(
                "tool_runtime.api_key holds characters that no key has; copy it from the service's dashboard anew"
            )
        if not self.tools():
            return  # a client that nothing is sent with would take 2 MB, and the certificates 2 more
        self._client = open_service_client(
            self._config.base_url,
            {"accept": "application/json"},
            self._config.proxy,
            "tool_runtime",
            _CONNECT_TIMEOUT_S,
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def tools(self) -> Sequence[ToolSpec]:
        return (SEARCH_TOOL,) if self.api_key or not self.needs_key else ()

    async def call(self, call: ToolCall) -> ToolResult:
        if call.name != SEARCH_TOOL.name:
            raise ToolFailed(f"There is no tool '{clean_line(call.name, 64)}' here.")
        if not self.tools():
            raise ToolFailed("Web search is not set up: the run config has no tool_runtime.api_key.")
        query = clean_line(validate_model(SearchArguments, call.arguments, "arguments").query, 4096)
        if not query:
            raise ToolFailed("Wrong arguments: query: must not be blank")
        options = validate_model(SearchOptions, call.options, "options")
        try:
            results = self._parse_body(await self._send(self.build_request(query, options)))
        except ToolFailed as exc:
            _log.warning("a search failed: %s", exc.message)
            raise
        passages = [
            self.parse_passage(cast("dict[str, Any]", result)) if isinstance(result, dict) else "" for result in results
        ]
        sources = build_sources(results, passages, options)
        return ToolResult(render_sources(sources), sources)

    async def _send(self, request: SearchRequest) -> bytes:
        assert self._client is not None, "started before it is called"
        try:
            async with (
                asyncio.timeout(self._config.tool_timeout_s),
                self._client.stream(
                    "GET" if request.body is None else "POST",
                    f"{self._config.base_url.rstrip('/')}{request.path}",
                    params=request.query,
                    json=request.body,
                    headers={name.encode(): value.encode() for name, value in request.headers.items()},
                ) as response,
            ):
                if response.status_code != 200:
                    raise ToolFailed(self._status_text(response.status_code))
                body = await read_body(response, _MAX_BODY_BYTES)
                if body is None:
                    raise ToolFailed("The search service answered with more than 1 MiB.")
                return body
        except EncodingError as exc:
            raise ToolFailed(f"The search service's answer cannot be read. {exc}") from None
        # `from None`: the causes hold the request, and with it the key.
        except (TimeoutError, httpx2.TimeoutException):
            limit = f"{self._config.tool_timeout_s:g} s ({_CONNECT_TIMEOUT_S:g} s to connect)"
            raise ToolFailed(f"The search service did not answer within {limit}.") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError):
            raise ToolFailed("The search service could not be reached, or broke off its answer.") from None

    def _status_text(self, status: int) -> str:
        if status >= 500:
            return f"The search service failed (HTTP {status}); try again later."
        return {**_STATUS_TEXTS, **self.status_texts}.get(status, f"The search service answered with HTTP {status}.")

    def _parse_body(self, body: bytes) -> list[Any]:
        try:
            results = self.parse_results(json.loads(body.decode(errors="replace")))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            results = None
        if not isinstance(results, list):
            raise ToolFailed("The search service answered with something that is no list of results.")
        return results  # pyright: ignore[reportUnknownVariableType] - parsed JSON
