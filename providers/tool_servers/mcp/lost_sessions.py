"""Recognises the answers by which a server says that it does not know a session (any more).

MCP has one: the status 404. Servers in use say it by other statuses, by errors of JSON-RPC, and in words.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

_LOST_STATUSES: Final = (401, 404, 410)
_MAX_CHARS: Final = 2000
_CODE: Final = re.compile(r"\b[A-Z]{1,40}(?:_[A-Z]{1,40}){1,8}\b")
_DROPPED: Final = re.compile(
    r"'[^']{0,200}'|\"[^\"]{0,200}\"|`[^`]{0,200}`|\b[a-z_-]{0,32}[0-9][a-z0-9_-]{0,200}\b|\b[a-z]{1,40}_[a-z_]{1,200}\b"
)
"""The quotations and identifiers of a message."""
_NO_WORD: Final = re.compile(r"[^a-z'|]")
_PHRASES: Final = (
    # the session is not found, session header is required, session id missing
    r"session(?: ids?)?(?: (?!session)(?:[a-z']{1,20}|\|)){0,5}? (?:unknown|invalid|expired|missing|required|stale"
    r"|inactive|unrecogni[sz]ed|uninitiali[sz]ed|no longer|(?:not|isn't|never|cannot be|could not be|does not|doesn't"
    r"|did not)(?: be)? (?:found|valid|exists?|known|active|available|established|registered|recogni[sz]ed"
    r"|initiali[sz]ed))",
    # unknown session, no valid session id, could not find the session, no transport for session
    r"(?:no|not a|unknown|invalid|expired|missing|stale|inactive|unrecogni[sz]ed|without|bad"
    r"|(?:cannot|can't|could not|couldn't|do not|don't|does not|doesn't|did not) (?:find|know|recogni[sz]e))"
    r"(?: [a-z']{1,20}){0,4}? session(?: ids?)?\b",
    # not initialized, before initialization, the client has not been initialized
    r"(?:^|server|client|session|connection|transport|mcp|protocol|request)(?: (?:is|was|has|have|received|yet))*"
    r" ?\b(?:not|never|before|until|without)(?: (?:been|yet|fully|properly|the|session|server|client|is|was|being))*"
    r" initiali[sz]",
    r"(?:^|server|client|session|connection|transport|mcp|protocol) (?:is )?uninitiali[sz]ed",
    # expect initialize request
    r"\b(?:expect(?:s|ed|ing)?|requires?|must|call|send)(?: (?:an?|the|be|to|first|client))* initiali[sz]e",
)
_LOST: Final = re.compile("|".join(f"(?:{phrase})" for phrase in _PHRASES))
_ENDED: Final = re.compile(
    r"session(?: ids?)?(?: [a-z']{1,20})?(?: (?:has|was|is|been|already))*"
    r" (?:terminated|closed|ended|timed out|lost|gone|destroyed)(?:$| \|)"
)


def names_lost_session(text: str, *, is_first_word: bool = True) -> bool:
    """Return True for words that say that the server does not know the session. That a session has ended says so in
    the server's first word on a request only: after others, the request may have been run before."""
    text = _CODE.sub(lambda code: code[0].replace("_", " "), text[:_MAX_CHARS]).lower()
    text = _DROPPED.sub(" ", text.replace("session_id", "session id").replace("sessionid", "session id"))
    words = " ".join(_NO_WORD.sub(" ", re.sub("[:;,.!?()\n]", " | ", text)).strip(" |").split())
    return bool(_LOST.search(words) or (is_first_word and _ENDED.search(words)))


def means_lost_session(status: int, body: str, *, has_session: bool) -> bool:
    """Return True for an HTTP error by which a server says that it does not know the session of the request. A server
    that answers 401 has not run the request either, and may have bound the session to a login that it has forgotten."""
    if has_session and status in _LOST_STATUSES:
        return True
    try:
        texts = [*_texts_of(json.loads(body))]
    except (ValueError, RecursionError):
        texts = [body]
    return any(map(names_lost_session, texts))


def _texts_of(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value, such as the messages of an error."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in cast(dict[str, Any], value).values():
            yield from _texts_of(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            yield from _texts_of(inner)
