"""The `search` tool that all search services share: its schema, its options, and cleaned results to show and cite."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from apis.errors import ToolFailed
from apis.tool_runtime import Source, ToolSpec
from apis.wire.tools import ascii_domain

_MAX_URL_CHARS: Final = 2048
_MAX_TITLE_CHARS: Final = 200
_CONTEXT_SIZES: Final[Mapping[str, tuple[int, int]]] = {"low": (5, 500), "medium": (10, 1000), "high": (20, 1500)}

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")

SEARCH_TOOL: Final = ToolSpec(
    name="search",
    description="Search the web. Gives a numbered list of pages, each with its title, URL and the passages that fit.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for, in plain words."}},
        "required": ["query"],
        "additionalProperties": False,
    },
)


_Domains = Annotated[list[Annotated[str, AfterValidator(ascii_domain)]], Field(max_length=100)]
_Model = TypeVar("_Model", bound=BaseModel)


class SearchArguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    query: str = Field(min_length=1, max_length=4096)


class SearchLocation(BaseModel):
    """Approximate location of the user. Each service uses the fields that it knows."""

    model_config = ConfigDict(strict=True)

    country: str | None = Field(None, pattern=r"^[A-Za-z]{2}$")
    region: str | None = None
    city: str | None = None
    timezone: str | None = None


class SearchOptions(BaseModel):
    """Options of a request's tool declaration. Null is unset."""

    model_config = ConfigDict(strict=True)

    allowed_domains: _Domains | None = None
    blocked_domains: _Domains | None = None
    context_size: Literal["low", "medium", "high"] | None = None
    user_location: SearchLocation | None = None
    live: bool | None = None

    @property
    def max_results(self) -> int:
        return _CONTEXT_SIZES[self.context_size or "medium"][0]

    @property
    def max_passage_chars(self) -> int:
        """Maximum characters of one result's text."""
        return _CONTEXT_SIZES[self.context_size or "medium"][1]

    @property
    def country(self) -> str | None:
        """Two capital letters (ISO 3166)."""
        country = self.user_location.country if self.user_location else None
        return country.upper() if country else None

    def permits_url(self, url: str) -> bool:
        """Return True when the declaration's domains, each with its subdomains, permit this URL."""
        host = parse_host(url)

        def within(domains: Sequence[str]) -> bool:
            return any(host == domain or host.endswith(f".{domain}") for domain in domains)

        return not within(self.blocked_domains or ()) and (not self.allowed_domains or within(self.allowed_domains))


def validate_model(model: type[_Model], values: Mapping[str, Any], subject: str) -> _Model:
    """Validate `values`. Raises ToolFailed with the first error, in words for the model."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(step) for step in first["loc"])
        raise ToolFailed(clean_line(f"Wrong {subject}: {path}: {first['msg']}", 500)) from None


def query_with_domains(query: str, options: SearchOptions, max_chars: int, max_words: int) -> str:
    """Return `query` with the domains as search operators, as many as fit into the limits. Engines may ignore them:
    `build_sources` filters the results again."""
    words = query.split()
    query = " ".join(words[:max_words])[:max_chars].rstrip()
    chars, count = max_chars - len(query), max_words - len(words)
    operators: list[str] = []
    for domain in options.allowed_domains or ():
        operator = f"site:{domain}" if not operators else f"OR site:{domain}"
        chars, count = chars - len(operator) - 1, count - len(operator.split())
        if chars < 2 or count < 0:
            break
        operators.append(operator)
    if operators:
        return f"{query} ({' '.join(operators)})" if len(operators) > 1 else f"{query} {operators[0]}"
    for domain in options.blocked_domains or ():
        operator = f"-site:{domain}"
        chars, count = chars - len(operator) - 1, count - 1
        if chars < 0 or count < 0:
            break
        query = f"{query} {operator}"
    return query


def build_sources(results: Sequence[Any], passages: Sequence[str], options: SearchOptions) -> list[Source]:
    """Return the results with a valid web address that the declaration permits, in their order."""
    pairs = zip(results, passages, strict=True)
    sources = (_build_source(result, passage, options.max_passage_chars) for result, passage in pairs)
    return [source for source in sources if source is not None and options.permits_url(source.url)][
        : options.max_results
    ]


def _build_source(result: Any, passage: str, max_chars: int) -> Source | None:
    match result:
        case {"url": str() as url} if (
            len(url) <= _MAX_URL_CHARS and url == clean_line(url).replace(" ", "") and parse_host(url)
        ):
            title = clean_line(text_or_empty(result.get("title")), _MAX_TITLE_CHARS) or parse_host(url)
            return Source(url, title, clean_line(passage, max_chars))
        case _:
            return None


def render_sources(sources: Sequence[Source]) -> str:
    """Return the results as text for the model."""
    if not sources:
        return "The search found no results."
    entries = (f"[{number}] {s.title}\n{s.url}\n{s.text}".rstrip() for number, s in enumerate(sources, start=1))
    return "\n\n".join(entries)


def parse_host(url: str) -> str:
    """Return the host of a web address in ASCII, empty for any other text."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            return ""
        return (parts.hostname or "").encode("idna").decode("ascii").rstrip(".")
    except ValueError:
        return ""


def text_or_empty(value: Any) -> str:
    """Return a string of parsed JSON, empty for any other value."""
    return value if isinstance(value, str) else ""


def join_passages(value: Any) -> str:
    """Join a list of passages of parsed JSON; empty for any other value."""
    if not isinstance(value, list):
        return ""
    return " … ".join(text_or_empty(passage) for passage in value)  # pyright: ignore[reportUnknownVariableType] - parsed JSON


def clean_line(text: str, max_chars: int | None = None) -> str:
    """Return one line without control characters, so that a page cannot forge the next entry of the list."""
    line = " ".join(_CONTROL.sub(" ", _SURROGATE.sub("\ufffd", text)).split())
    return line if max_chars is None or len(line) <= max_chars else f"{line[: max_chars - 1]}…"
