"""Scopes: the rights of an API key, from the texts in a request or on the command line to a checked Grant."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from apis.errors import InvalidRequest

Scope = Literal[
    "responses", "files", "read", "api.agents.read", "api.agents.write", "api.vaults.read", "api.vaults.write", "admin"
]

PROJECT_SCOPES: Final[frozenset[Scope]] = frozenset(
    {"responses", "files", "read", "api.agents.read", "api.agents.write", "api.vaults.read", "api.vaults.write"}
)
"""All rights within one project, which a key without scopes has."""
VAULT_USERS: Final[frozenset[Scope]] = frozenset({"api.vaults.read", "api.vaults.write"})
"""Rights of which a key needs one to have requests use the vaults of its project."""
ADMIN_SCOPE: Final[frozenset[Scope]] = frozenset({"admin"})
MODEL_PREFIX: Final = "model:"
TOOL_PREFIX: Final = "tool:"
_MAX_SCOPES: Final = 128
_MAX_NAME_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights that scopes stand for. `models` and `tools` are None where any may be used."""

    scopes: frozenset[Scope] = PROJECT_SCOPES
    models: frozenset[str] | None = None
    tools: frozenset[str] | None = None


def parse_project_scopes(texts: Iterable[str]) -> Grant:
    """Return the rights of a project's key: `responses`, `files`, `read`, `api.agents.read`, `api.agents.write`,
    `api.vaults.read` and `api.vaults.write`, all of them if none is named, and `model:NAME` and `tool:TYPE`, any of
    them if none is named. Raises InvalidRequest with the param `scopes`."""
    entries = list(texts)
    if len(entries) > _MAX_SCOPES:
        raise _scope_error(f"A key has at most {_MAX_SCOPES} scopes.")
    names, models, tools = set[Scope](), set[str](), set[str]()
    for text in entries:
        if len(text) > _MAX_NAME_CHARS:
            raise _scope_error(f"A scope has at most {_MAX_NAME_CHARS} characters.")
        if text.startswith(MODEL_PREFIX) and text != MODEL_PREFIX:
            models.add(text.removeprefix(MODEL_PREFIX))
        elif text.startswith(TOOL_PREFIX) and text != TOOL_PREFIX:
            tools.add(text.removeprefix(TOOL_PREFIX))
        elif text == "admin":
            raise _scope_error("The key of an administrator belongs to no project: create it as an admin API key.")
        elif text in get_args(Scope):
            names.add(cast("Scope", text))
        else:
            raise _scope_error(
                f"Unknown scope '{text[:64]}'. Scopes are responses, files, read, api.agents.read, api.agents.write, "
                "api.vaults.read, api.vaults.write, model:NAME and tool:TYPE."
            )
    return Grant(
        frozenset(names) or PROJECT_SCOPES,
        frozenset(models) if models else None,
        frozenset(tools) if tools else None,
    )


def _scope_error(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="scopes", code="invalid_value")
