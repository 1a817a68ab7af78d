"""SearchService: one tool named `search` over a web API, with every way in which such an API can fail."""

import json
import logging
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, cast

import aiohttp
from pydantic import ConfigDict, Field, SecretStr

from apis.errors import ConfigError, ToolFailed
from apis.provider import Provider
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime, ToolSpec
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
    """A search as a service wants to be asked: with `body` as a POST of JSON, or else a GET with `query`."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Mapping[str, Any] | None = None


class SearchService(ToolRuntime):
    """Searches with the service that a subclass speaks to. Without a key that it needs it has no tool.

    Options of a call: `allowed_domains` and `blocked_domains` (with their subdomains; they hold whatever the service
    makes of them), `context_size`, `user_location`, and `live: false`, with which nothing live may be fetched: a
    service that cannot promise it refuses the search.
    """

    needs_key: ClassVar[bool] = True
    status_texts: ClassVar[Mapping[int, str]] = {}

    class Config(Provider.Config):
        """`tool_timeout_s` bounds a whole search, connecting and reading included."""

        model_config = ConfigDict(hide_input_in_errors=True)

        api_key: SecretStr | None = None
        base_url: ServiceUrl
        tool_timeout_s: float = Field(default=30.0, gt=0, le=600)

    def __init__(self, config: Config) -> None:
        self._config = config
        # A key taken from an unset environment variable is an empty text.
        self.api_key = (config.api_key.get_secret_value() if config.api_key else "").strip()
        self._http_session: aiohttp.ClientSession | None = None

    @abstractmethod
    def build_request(self, query: str, options: SearchOptions) -> SearchRequest:
        """The request of a search. Raises ToolFailed when the service cannot hold an option."""

    @abstractmethod
    def parse_results(self, response: Any) -> Any:
        """The list of results in an answer, which is any JSON. May raise TypeError, KeyError and AttributeError."""

    @abstractmethod
    def parse_passage(self, result: Mapping[str, Any]) -> str:
        """What a result says of its page."""

    async def start(self) -> None:
        if not re.fullmatch(r"[\x21-\x7e]*", self.api_key):
            raise ConfigError(
                "tool_runtime.api_key holds characters that no key has; copy it from the service's dashboard anew"
            )
        self._http_session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._config.tool_timeout_s, connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            # A small compressed body can inflate without bound, so none is asked for and none is inflated.
            headers={"Accept-Encoding": "identity", "Accept": "application/json"},
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        if self._http_session is not None:
            await self._http_session.close()

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
        assert self._http_session is not None, "started before it is called"
        try:
            async with self._http_session.request(
                "GET" if request.body is None else "POST",
                f"{self._config.base_url.rstrip('/')}{request.path}",
                params=request.query,
                json=request.body,
                headers=request.headers,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise ToolFailed(self._status_text(response.status))
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise ToolFailed("The search service answered in an encoding that was not asked for.")
                return await _read_bounded(response)
        # `from None`: the causes carry the request's headers in their repr, and with them the key.
        except TimeoutError:
            limit = f"{self._config.tool_timeout_s:g} s ({_CONNECT_TIMEOUT_S:g} s to connect)"
            raise ToolFailed(f"The search service did not answer within {limit}.") from None
        except (aiohttp.ClientError, OSError):
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


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise ToolFailed("The search service answered with more than 1 MiB.")
    return bytes(body)
