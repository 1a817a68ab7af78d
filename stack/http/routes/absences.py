"""The resources of OpenAI's API that this server does not have, each with the reason."""

import re
from collections.abc import Mapping
from typing import Final

_TEXT_ONLY: Final = "The models here write text."
_NO_TRAINING: Final = "No model is trained or graded here."
_NO_PERSONS: Final = (
    "The server knows no persons: the keys of a project belong to its service accounts, and the scopes of a key are "
    "its rights."
)
_STORE: Final = "All that is stored lies in the store of this server, encrypted by the store's own means."
ABSENT_RESOURCES: Final[Mapping[str, str]] = {
    "agents": "An agent runs where its client is, by responses and conversations.",
    "assistants": "Use responses and conversations.",
    "chatkit": "Use responses and conversations.",
    "content_provenance_checks": "No images are checked here.",
    "evals": _NO_TRAINING,
    "fine_tuning": _NO_TRAINING,
    "live": _TEXT_ONLY,
    "moderations": "No moderation model is served here.",
    "projects": _NO_PERSONS,
    "prompts": "Prompts are templates of the run config, which requests refer to by 'prompt'.",
    "realtime": _TEXT_ONLY,
    "safety": "No request is checked by user.",
    "threads": "Use responses and conversations.",
    "vaults": "Secrets are a matter of the client and of the run config.",
    "videos": _TEXT_ONLY,
}
"""By the first part of the path below /v1."""


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
_ADMINISTRATION: Final = re.compile(r"/organization/(?:projects/[^/]+/)?([a-z_]+)")


def absence_message(path: str) -> str | None:
    """Return the error of a path of one of these resources, None for any other path."""
    path = path.removeprefix("/v1")
    if path.startswith("/v1/"):
        return f"Unknown request URL: '/v1{path[:256]}' has '/v1' twice. The base URL of a client ends with one '/v1'."
    if match := _ADMINISTRATION.match(path):
        name, reason = match[0], ABSENT_ADMINISTRATION.get(match[1])
    else:
        name = f"/{path.removeprefix('/').partition('/')[0]}"
        reason = ABSENT_RESOURCES.get(name[1:])
    return None if reason is None else f"'/v1{name[:256]}' is not offered by this server. {reason}"
