"""Exa: web search through Exa's API, as one tool named `search`."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from apis.errors import ConfigError, ToolFailed
from apis.provider import Provider
from apis.tool_runtime import Source, ToolCall, ToolResult, ToolRuntime, ToolSpec

_log = logging.getLogger(__name__)

_MAX_BODY_BYTES: Final = 1024 * 1024
_CONNECT_TIMEOUT_S: Final = 5.0
_MAX_URL_CHARS: Final = 2048
_MAX_TITLE_CHARS: Final = 200

_CONTEXT: Final[Mapping[str, tuple[int, int]]] = {"low": (5, 500), "medium": (10, 1000), "high": (20, 1500)}
"""Context size -> results, and characters of each."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_DOMAIN: Final = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]")

_STATUS_TEXTS: Final[Mapping[int, str]] = {
    400: "The search service did not accept the search.",
    401: "The search service refused the key.",
    402: "The search service's credits are used up.",
    403: "The search service refused the key.",
    422: "The search service did not accept the search.",
    429: "The search service allows no more searches just now; try again later.",
}

_SEARCH: Final = ToolSpec(
    name="search",
    description="Search the web. Gives a numbered list of pages, each with its title, URL and the passages that fit.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for, in plain words."}},
        "required": ["query"],
        "additionalProperties": False,
    },
)


def _domain(name: str) -> str:
    """The form in which domains compare: ASCII, lower case, no final dot. Raises ValueError for what is no domain."""
    ascii_name = name.encode("idna").decode("ascii").lower().rstrip(".")
    if len(ascii_name) > 253 or not _DOMAIN.fullmatch(ascii_name):
        raise ValueError("not a domain name")
    return ascii_name


_Domains = Annotated[list[Annotated[str, AfterValidator(_domain)]], Field(max_length=100)]


_Model = TypeVar("_Model", bound=BaseModel)


class _Arguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    query: str = Field(min_length=1, max_length=4096)


class _Location(BaseModel):
    model_config = ConfigDict(strict=True)

    country: str | None = Field(None, pattern=r"^[A-Za-z]{2}$")


class _Options(BaseModel):
    """What the request's tool declaration may set. Null is unset."""

    model_config = ConfigDict(strict=True)

    allowed_domains: _Domains | None = None
    blocked_domains: _Domains | None = None
    context_size: Literal["low", "medium", "high"] | None = None
    user_location: _Location | None = None
    live: bool | None = None


class Exa(ToolRuntime):
    """Searches with Exa (https://exa.ai/docs/reference/search). Without a key it has no tool.

    Options of a call: `allowed_domains` and `blocked_domains` (with their subdomains), `context_size`,
    `user_location` (Exa knows its `country` only), and `live: false` for pages of Exa's own cache only.
    """

    class Config(Provider.Config):
        """`tool_timeout_s` bounds a whole search, connecting and reading included."""

        model_config = ConfigDict(hide_input_in_errors=True)

        api_key: SecretStr | None = None
        base_url: str = Field("https://api.exa.ai", pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")
        tool_timeout_s: float = Field(30.0, gt=0, le=600)

    def __init__(self, config: Config) -> None:
        self._config = config
        # A key taken from an unset environment variable is an empty text.
        self._key = (config.api_key.get_secret_value() if config.api_key else "").strip()
        self._url = f"{config.base_url.rstrip('/')}/search"
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        if not re.fullmatch(r"[\x21-\x7e]*", self._key):
            raise ConfigError(
                "tool_runtime.api_key holds characters that no key has; copy it from Exa's dashboard anew"
            )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._config.tool_timeout_s, connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            # A small compressed body can inflate without bound, so none is asked for and none is inflated.
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def tools(self) -> Sequence[ToolSpec]:
        return (_SEARCH,) if self._key else ()

    async def call(self, call: ToolCall) -> ToolResult:
        if call.name != _SEARCH.name:
            raise ToolFailed(f"There is no tool '{_clean(call.name, 64)}' here.")
        if not self._key:
            raise ToolFailed("Web search is not set up: the run config has no tool_runtime.api_key.")
        query = _clean(_validated(_Arguments, call.arguments, "arguments").query, 4096)
        if not query:
            raise ToolFailed("Wrong arguments: query: must not be blank")
        options = _validated(_Options, call.options, "options")
        try:
            sources = _sources(await self._post(_search_body(query, options)), options)
        except ToolFailed as exc:
            _log.warning("a search failed: %s", exc.message)
            raise
        return ToolResult(_listing(sources), sources)

    async def _post(self, body: Mapping[str, Any]) -> bytes:
        assert self._session is not None, "started before it is called"
        try:
            async with self._session.post(
                self._url, json=body, headers={"x-api-key": self._key}, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise ToolFailed(_status_text(response.status))
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise ToolFailed("The search service answered in an encoding that was not asked for.")
                return await _read_bounded(response)
        # `from None`: the causes carry the request's headers in their repr, and with them the key.
        except TimeoutError:
            limit = f"{self._config.tool_timeout_s:g} s ({_CONNECT_TIMEOUT_S:g} s to connect)"
            raise ToolFailed(f"The search service did not answer within {limit}.") from None
        except (aiohttp.ClientError, OSError):
            raise ToolFailed("The search service could not be reached, or broke off its answer.") from None


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise ToolFailed("The search service answered with more than 1 MiB.")
    return bytes(body)


def _status_text(status: int) -> str:
    if status >= 500:
        return f"The search service failed (HTTP {status}); try again later."
    return _STATUS_TEXTS.get(status, f"The search service answered with HTTP {status}.")


def _validated(model: type[_Model], values: Mapping[str, Any], what: str) -> _Model:
    try:
        return model.model_validate(dict(values))
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(step) for step in first["loc"])
        raise ToolFailed(_clean(f"Wrong {what}: {path}: {first['msg']}", 500)) from None


def _search_body(query: str, options: _Options) -> dict[str, Any]:
    """Exa's request. Passages only, no whole texts: Exa bills each view of a page, and passages fit the query."""
    results, chars = _CONTEXT[options.context_size or "medium"]
    contents: dict[str, Any] = {"highlights": {"maxCharacters": chars}}
    if options.live is False:
        contents["maxAgeHours"] = -1
    body: dict[str, Any] = {"query": query, "type": "auto", "numResults": results, "contents": contents}
    if options.allowed_domains:
        body["includeDomains"] = options.allowed_domains
    if options.blocked_domains:
        body["excludeDomains"] = options.blocked_domains
    if options.user_location is not None and options.user_location.country is not None:
        body["userLocation"] = options.user_location.country.upper()
    return body


def _sources(body: bytes, options: _Options) -> list[Source]:
    """The results of an answer of Exa's, in its order. Raises ToolFailed when it is not one."""
    try:
        answer: Any = json.loads(body.decode(errors="replace"))
        found: Any = answer["results"]
    except (ValueError, TypeError, KeyError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise ToolFailed("The search service answered with something that is no list of results.")
    limit, chars = _CONTEXT[options.context_size or "medium"]
    sources = (_source(result, chars) for result in found)  # pyright: ignore[reportUnknownVariableType] - parsed JSON
    return [source for source in sources if source is not None and _permitted(source.url, options)][:limit]


def _source(result: Any, chars: int) -> Source | None:
    """None for a result without an address that a client could follow."""
    match result:
        case {"url": str() as url} if len(url) <= _MAX_URL_CHARS and url == _clean(url).replace(" ", "") and _host(url):
            title = _clean(_text(result.get("title")), _MAX_TITLE_CHARS) or _host(url)
            passages: Any = result.get("highlights")
            if isinstance(passages, list):
                joined = " … ".join(_text(passage) for passage in passages)  # pyright: ignore[reportUnknownVariableType] - parsed JSON
            else:
                joined = _text(result.get("summary")) or _text(result.get("text"))
            return Source(url, title, _clean(joined, chars))
        case _:
            return None


def _permitted(url: str, options: _Options) -> bool:
    """The declaration's domains hold here too, whatever the service makes of them."""
    host = _host(url)

    def within(domains: Sequence[str]) -> bool:
        return any(host == domain or host.endswith(f".{domain}") for domain in domains)

    return not within(options.blocked_domains or ()) and (
        not options.allowed_domains or within(options.allowed_domains)
    )


def _host(url: str) -> str:
    """Empty when `url` is not a web address."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            return ""
        return (parts.hostname or "").encode("idna").decode("ascii").rstrip(".")
    except ValueError:
        return ""


def _listing(sources: Sequence[Source]) -> str:
    if not sources:
        return "The search found no results."
    entries = (f"[{number}] {s.title}\n{s.url}\n{s.text}".rstrip() for number, s in enumerate(sources, start=1))
    return "\n\n".join(entries)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _clean(text: str, max_chars: int | None = None) -> str:
    """One line of storable text: a page must not be able to begin what looks like the next entry of the list."""
    line = " ".join(_CONTROL.sub(" ", _SURROGATE.sub("\ufffd", text)).split())
    return line if max_chars is None or len(line) <= max_chars else f"{line[: max_chars - 1]}…"
