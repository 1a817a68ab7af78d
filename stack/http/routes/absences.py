"""The resources and single routes of other servers that this one does not have, each with the reason, or with another
route to use."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from apis.errors import Unsupported
from stack.http.context import HttpContext, Services
from stack.http.route import AGENTS, ANY_PROJECT_KEY, RESPONSES, Access, Handler, Route

WEBSOCKET_HINT: Final = (
    " Its WebSocket is opened with the headers `Upgrade: websocket` and `Connection: upgrade`, which a proxy in "
    "front has to pass on."
)
_TEXT_ONLY: Final = "The models here write text."
_NO_TRAINING: Final = "No model is trained or graded here."
_NO_PERSONS: Final = (
    "The server knows no persons: the keys of a project belong to its service accounts, and the scopes of a key are "
    "its rights."
)
_CLASSIFY: Final = "Use decisions: a choice or a score of each text."
_TOKENS: Final = "Use responses.input_tokens: it counts the tokens of a prompt."
_STORE: Final = "All that is stored lies in the store of this server, encrypted by the store's own means."
ABSENT_RESOURCES: Final[Mapping[str, str]] = {
    "api": "This is a path of Ollama: use chat completions, with a base URL that ends with /v1.",
    "assistants": "Use responses and conversations.",
    "classify": _CLASSIFY,
    "complete": "Use messages, or text completions.",
    "chatkit": "Use responses and conversations.",
    "content_provenance_checks": "No images are checked here.",
    "detokenize": "Token ids are a matter of the engine.",
    "edits": "Use responses.",
    "engines": "Use models.",
    "evals": _NO_TRAINING,
    "fine_tuning": _NO_TRAINING,
    "live": _TEXT_ONLY,
    "pooling": "Use embeddings.",
    "projects": _NO_PERSONS,
    "prompts": "Prompts are templates of the run config, which requests refer to by 'prompt'.",
    "realtime": _TEXT_ONLY,
    "rerank": "Use the search of a vector store, or decisions: a score of each text.",
    "safety": "No request is checked by user.",
    "score": _CLASSIFY,
    "threads": "Use responses and conversations.",
    "tokenize": _TOKENS,
    "v1beta": "This is a path of Gemini: use responses, with a base URL that ends with /v1.",
    "v2": "This is a path of Cohere: use responses, with a base URL that ends with /v1.",
    "videos": _TEXT_ONLY,
}
"""By the first part of the path below /v1."""


@dataclass(frozen=True, slots=True)
class AbsentRoute:
    """Routes of one path of a resource that is served: `name` says in an error what is not offered, `instead` why, or
    what to use."""

    methods: tuple[str, ...]
    path: str
    name: str
    instead: str
    access: Access = RESPONSES
    param: str | None = None

    def to_routes(self) -> tuple[Route, ...]:
        """Return the routes, which say that they are not offered."""
        message = f"{self.name} not offered by this server{self.instead}"
        refuse = refuse_route(lambda: Unsupported(message, param=self.param))
        return tuple(
            Route(method, self.path, self.access, refuse, form=BaseModel, form_or_json=True, stores=False)
            for method in self.methods
        )


def refuse_route(build_error: Callable[[], Unsupported]) -> Handler:
    """Return a handler that raises this error."""

    async def refuse(_http: Request, _context: HttpContext, _services: Services) -> Response:
        raise build_error()

    return refuse


_STORED_CHATS: Final = "Storing chat completions is", ": use responses."
_COMPLETION_PATH: Final = "/chat/completions/{completion_id}"
_VOICES: Final = "A voice is", f". {_TEXT_ONLY}"
_MESSAGE_BATCHES: Final = "A batch of messages is", ": use /v1/batches with lines of responses."
_BATCH_PATH: Final = "/messages/batches/{batch_id}"
_SESSION_TRACES: Final = "A trace of a session is", ": read its events and items, or set up OpenTelemetry."
_ABSENCES: Final = (
    AbsentRoute(("GET",), "/chat/completions", *_STORED_CHATS, param="store"),
    AbsentRoute(("GET", "POST", "DELETE"), _COMPLETION_PATH, *_STORED_CHATS, param="store"),
    AbsentRoute(("GET",), f"{_COMPLETION_PATH}/messages", *_STORED_CHATS, param="store"),
    AbsentRoute(
        ("DELETE",),
        "/models/{model_id:path}",
        "Deleting a model is",
        ": the run config names the models, and `stack models remove` removes a file.",
        ANY_PROJECT_KEY,
    ),
    AbsentRoute(("POST",), "/images/variations", "A variation of an image is", ": use images.edit with a prompt."),
    AbsentRoute(("POST",), "/audio/speech", "Speech is", f". {_TEXT_ONLY}"),
    AbsentRoute(
        ("POST",),
        "/audio/translations",
        "A translation of audio is",
        ": use audio.transcriptions, and let a chat model translate the text.",
    ),
    AbsentRoute(("GET", "POST"), "/audio/voices", *_VOICES),
    AbsentRoute(("GET", "POST", "DELETE"), "/audio/voices/{voice_id}", *_VOICES),
    AbsentRoute(("GET", "POST"), "/audio/voice_consents", *_VOICES),
    AbsentRoute(("GET", "POST", "DELETE"), "/audio/voice_consents/{consent_id}", *_VOICES),
    AbsentRoute(("GET", "POST"), "/messages/batches", *_MESSAGE_BATCHES),
    AbsentRoute(("GET", "DELETE"), _BATCH_PATH, *_MESSAGE_BATCHES),
    AbsentRoute(("POST",), f"{_BATCH_PATH}/cancel", *_MESSAGE_BATCHES),
    AbsentRoute(("GET",), f"{_BATCH_PATH}/results", *_MESSAGE_BATCHES),
    *(
        AbsentRoute(("GET", "DELETE"), f"/agents/sessions/{{session_id}}/traces{rest}", *_SESSION_TRACES, AGENTS)
        for rest in ("", "/{rest:path}")
    ),
)
ABSENT_ROUTES: Final = tuple(route for row in _ABSENCES for route in row.to_routes())
"""Single routes of other servers, below resources that are served."""


ABSENT_ADMINISTRATION: Final[Mapping[str, str]] = {
    "certificates": "A proxy in front of the server checks client certificates.",
    "data_retention": "Set `responses.retention_days` in the run config, or the data_retention of a project.",
    "external_keys": _STORE,
    "external_storage": _STORE,
    "groups": _NO_PERSONS,
    "invites": _NO_PERSONS,
    "roles": _NO_PERSONS,
    "users": _NO_PERSONS,
    "workload_identity_providers": "Workloads use the keys of service accounts.",
}
"""By the part of the path below /v1/organization, or below one of its projects."""
_OTHER_ROOTS: Final = frozenset({"api", "v1beta", "v2"})
"""First parts of paths that are not below /v1."""
_ADMINISTRATION: Final = re.compile(r"/organization/(?:projects/[^/]+/)?([a-z_]+)")


ABSENT_MESSAGE_RESOURCES: Final[Mapping[str, str]] = {
    "files": "Store a file by OpenAI's form of this route, without the header 'anthropic-version': its id works here.",
    "skills": "Store a skill by OpenAI's form of this route, without the header 'anthropic-version'.",
}
"""Resources that this server has in OpenAI's form only, by the first part of the path below /v1."""


def message_absence(path: str) -> str | None:
    """Return the error of a path of one of these resources in Anthropic's form, None for any other path."""
    name = path.removeprefix("/v1").removeprefix("/").partition("/")[0]
    reason = ABSENT_MESSAGE_RESOURCES.get(name)
    return None if reason is None else f"'/v1/{name}' is not offered by this server in Anthropic's form. {reason}"


def absence_message(path: str) -> str | None:
    """Return the error of a path of one of these resources, None for any other path."""
    path = path.removeprefix("/v1") if path.startswith("/v1/") else path
    if path.startswith("/v1/"):
        return f"Unknown request URL: '/v1{path[:256]}' has '/v1' twice. The base URL of a client ends with one '/v1'."
    if match := _ADMINISTRATION.match(path):
        name, reason = match[0], ABSENT_ADMINISTRATION.get(match[1])
    else:
        name = f"/{path.removeprefix('/').partition('/')[0]}"
        reason = ABSENT_RESOURCES.get(name[1:])
    if reason is None:
        return None
    prefix = "" if name[1:] in _OTHER_ROOTS else "/v1"
    return f"'{prefix}{name[:256]}' is not offered by this server. {reason}"
