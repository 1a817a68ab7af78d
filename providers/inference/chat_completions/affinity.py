"""Affinity: which of several equal servers has the prefix of a chat in its cache, and how a router learns of it."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from apis.chat import ChatRequest, Message, TextPart, share_of_salt
from providers.common.recent import RecentEntries

LOAD_FACTOR: Final = 1.25
"""Most requests in flight on a server chosen by key, as a multiple of the mean over the servers."""
UNBOUNDED_IN_FLIGHT: Final = 8
"""Requests in flight that a server takes from its keys however idle the others are: an engine generates so few together
in less than twice the time of one, while a lost prefix costs all of its prefill."""
MAX_MOVED_KEYS: Final = 10_000
"""Keys that a process remembers because their first server gave them away: some 2 MB."""
MIN_OPENING_CHARS: Final = 1024
"""Length from which the beginning of a prompt is worth a common server."""
_MAX_HASHED_CHARS: Final = 65_536

AFFINITY_PRESETS: Final[Mapping[str, str]] = {
    "llm-d": "x-session-id",
    "dynamo": "X-Dynamo-Session-ID",
    "sglang": "X-SMG-Routing-Key",
    "litellm": "x-litellm-session-id",
}
"""Routers in front of engines, and the header by which each sends the requests of a session to one engine."""
FAIRNESS_HEADER: Final = "x-llm-d-inference-fairness-id"
"""Header of llm-d that names the tenant among whom it shares its engines."""
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_RESERVED_HEADERS: Final = frozenset(
    (
        *("accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "cookie"),
        *("expect", "host", "keep-alive", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
        *("traceparent", "tracestate"),
    )
)


def check_affinity_headers(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is neither a preset nor a header free for this use."""
    for name in names:
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _RESERVED_HEADERS:
            presets = ", ".join(AFFINITY_PRESETS)
            raise ValueError(f"'{name}' is neither the name of a free header nor one of: {presets}")


def affinity_headers(names: Sequence[str], request: ChatRequest) -> dict[str, str]:
    """Return the headers that carry the request's key to a router; none for a request without a key."""
    key = affinity_key(request) if names else None
    if key is None:
        return {}
    headers = {AFFINITY_PRESETS.get(name, name): key for name in names}
    if "llm-d" in names and (share := share_of_salt(request.cache_salt)):
        headers[FAIRNESS_HEADER] = share
    return headers


def affinity_key(request: ChatRequest) -> str | None:
    """Return an opaque key, equal for chats that share a prefix and different between tenants; None where nothing is
    known to be shared. It is derived from `prompt_cache_key`, else from the root of the chain, else from the beginning
    of a prompt that is long enough."""
    if request.prompt_cache_key:
        identity = f"key\n{request.prompt_cache_key}"
    elif request.cache_root:
        identity = f"root\n{request.cache_root}"
    elif opening := _opening(request):
        identity = f"opening\n{opening}"
    else:
        return None
    text = f"{share_of_salt(request.cache_salt)}\n{identity}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _opening(request: ChatRequest) -> str:
    """Return the texts that begin the prompt, up to the first message that is no instruction; empty if they are short.
    A client that sends the whole conversation with each request sends them again with each."""
    texts = [request.model]
    for tool in request.tools or ():
        texts.append(tool.name)
        if tool.type == "function":
            texts.append(tool.function.description or "")
    for message in request.messages:
        texts.append(_text(message))
        if message.role not in ("system", "developer"):
            break
    return "\n".join(texts) if sum(map(len, texts)) >= MIN_OPENING_CHARS else ""


def _text(message: Message) -> str:
    if not isinstance(message.content, list):
        return (message.content or "")[:_MAX_HASHED_CHARS]
    return "\n".join(part.text[:_MAX_HASHED_CHARS] for part in message.content if isinstance(part, TextPart))


def rank_servers(key: str, urls: Sequence[str]) -> list[int]:
    """Return the indexes of the servers, the one for the key first: rendezvous hashing (Thaler and Ravishankar, 1998).
    Every process computes the same order, and a server that comes or goes moves only the keys it takes or had."""

    def score(index: int) -> bytes:
        return hashlib.blake2b(f"{key}\n{urls[index]}".encode(), digest_size=8).digest()

    return sorted(range(len(urls)), key=score, reverse=True)


class ServersByKey:
    """The choice of a server by the key of a request: the first of the key's rank that is not busy beyond the others.

    A key that was given away stays with the server that has its prefix now: a chain that went back would have to be
    computed there again. A process remembers the newest ones of its own requests.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        """`urls` are those of the servers, or other names of them that all processes write alike."""
        self._urls = urls
        self._servers = RecentEntries[str, int](MAX_MOVED_KEYS)

    def rank(self, key: str) -> list[int]:
        """Return the indexes of the servers in the order of the key: the one that has its prefix first, then as
        `rank_servers`."""
        ranked = rank_servers(key, self._urls)
        server = self._servers.get(key)
        return ranked if server is None else [server, *(each for each in ranked if each != server)]

    def choose(self, key: str, in_flight: Mapping[int, int]) -> int:
        """Return the server for a request with this key, and take note of it. `in_flight` has the requests in flight of
        each server that may get it, by its index."""
        bound = in_flight_bound(list(in_flight.values()))
        chosen = next(each for each in self.rank(key) if each in in_flight and in_flight[each] < bound)
        self.record(key, chosen)
        return chosen

    def record(self, key: str, server: int) -> None:
        """Take note of the server that a request with this key goes to."""
        self._servers.pop(key, None)
        if rank_servers(key, self._urls)[0] != server:
            self._servers[key] = server


def in_flight_bound(in_flight: Sequence[int]) -> int:
    """Return how many requests one of these servers may have in flight with one more: consistent hashing with bounded
    loads (Mirrokni, Thorup and Zadimoghaddam, 2018)."""
    return max(UNBOUNDED_IN_FLIGHT, math.ceil(LOAD_FACTOR * (sum(in_flight) + 1) / len(in_flight)))
