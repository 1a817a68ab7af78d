"""The resources of OpenAI's API that this server does not have, each with the reason."""

from collections.abc import Mapping
from typing import Final

_TEXT_ONLY: Final = "The models here write text."
_NO_TRAINING: Final = "No model is trained or graded here."
_OPERATOR: Final = "The run config and the command line are for operators."
ABSENT_RESOURCES: Final[Mapping[str, str]] = {
    "agents": "An agent runs where its client is, by responses and conversations.",
    "assistants": "Use responses and conversations.",
    "audio": _TEXT_ONLY,
    "chatkit": "Use responses and conversations.",
    "content_provenance_checks": "No images are checked here.",
    "decisions": "Ask for one by a response with a JSON schema.",
    "evals": _NO_TRAINING,
    "fine_tuning": _NO_TRAINING,
    "images": "The routes here write text.",
    "live": _TEXT_ONLY,
    "moderations": "No moderation model is served here.",
    "projects": _OPERATOR,
    "prompts": "Prompts are templates of the run config, which requests refer to by 'prompt'.",
    "realtime": _TEXT_ONLY,
    "safety": "No request is checked by user.",
    "threads": "Use responses and conversations.",
    "vaults": "Secrets are a matter of the client and of the run config.",
    "videos": _TEXT_ONLY,
    "webhook_endpoints": "Webhooks are a setting of the run config.",
    "webhook_event_types": "Webhooks are a setting of the run config.",
}
"""By the first part of the path below /v1."""


def absence_message(path: str) -> str | None:
    """Return the error of a path of one of these resources, None for any other path."""
    resource = path.removeprefix("/v1").removeprefix("/").partition("/")[0]
    reason = ABSENT_RESOURCES.get(resource)
    return None if reason is None else f"'/v1/{resource}' is not offered by this server. {reason}"
