"""All routes below /v1, by the names of their resources. Their modules are imported at the first request to one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from apis.imports import import_from_string
from stack.http.route import Route


class RouteRows:
    """The rows of several modules, as "module:NAME", each with the first parts of the paths that its rows have."""

    def __init__(self, modules: Mapping[str, tuple[str, ...]]) -> None:
        self.modules: Final = modules

    def __iter__(self) -> Iterator[Route]:
        """Import all of the modules, and yield their rows."""
        for rows in self.modules:
            yield from import_from_string(rows)


API_ROUTES: Final = RouteRows(
    {
        "stack.http.routes.responses:RESPONSE_ROUTES": ("responses",),
        "stack.http.routes.chat:CHAT_ROUTES": ("chat",),
        "stack.http.routes.completions:COMPLETION_ROUTES": ("completions",),
        "stack.http.routes.embeddings:EMBEDDING_ROUTES": ("embeddings",),
        "stack.http.routes.decisions:DECISION_ROUTES": ("decisions",),
        "stack.http.routes.moderations:MODERATION_ROUTES": ("moderations",),
        "stack.http.routes.images:IMAGE_ROUTES": ("images",),
        "stack.http.routes.audio:AUDIO_ROUTES": ("audio",),
        "stack.http.routes.models:MODEL_ROUTES": ("models",),
        "stack.http.routes.conversations:CONVERSATION_ROUTES": ("conversations",),
        "stack.http.routes.agents:AGENT_ROUTES": ("agents", "vaults"),
        "stack.http.routes.files:FILE_ROUTES": ("files",),
        "stack.http.routes.vector_stores:VECTOR_STORE_ROUTES": ("vector_stores",),
        "stack.http.routes.containers:CONTAINER_ROUTES": ("containers",),
        "stack.http.routes.uploads:UPLOAD_ROUTES": ("uploads",),
        "stack.http.routes.batches:BATCH_ROUTES": ("batches",),
        "stack.http.routes.webhook_endpoints:WEBHOOK_ENDPOINT_ROUTES": ("webhook_endpoints", "webhook_event_types"),
        "stack.http.routes.organization.table:ORGANIZATION_ROUTES": ("organization",),
        "stack.http.routes.skills:SKILL_ROUTES": ("skills",),
    }
)
"""The routes of OpenAI's API, each served with and without the prefix /v1."""
EXTENSION_ROUTES: Final = RouteRows(
    {
        "stack.http.routes.messages:MESSAGE_ROUTES": ("messages",),
        "stack.http.routes.decisions:SYSTEM_ONE_ROUTES": ("systemone",),
        "stack.http.routes.listings:LISTING_ROUTES": ("conversations", "responses"),
        "stack.http.routes.console.overview:OVERVIEW_ROUTES": ("stack",),
        "stack.http.routes.console.page_images:PAGE_IMAGE_ROUTES": ("files", "stack"),
        "stack.http.routes.traces:TRACE_ROUTES": ("traces",),
        "stack.http.routes.organization.table:ORGANIZATION_EXTENSION_ROUTES": ("organization",),
        "stack.http.routes.organization.own_key:OWN_KEY_ROUTES": ("stack",),
    }
)
"""Routes that OpenAI's API does not have."""
REFUSED_ROUTES: Final = RouteRows(
    {
        "stack.http.routes.organization.table:REFUSED_ORGANIZATION_ROUTES": ("organization",),
        "stack.http.routes.absences:ABSENT_ROUTES": ("agents", "audio", "chat", "images", "messages", "models"),
    }
)
"""Routes of other servers that answer with the reason why they are not offered; no document describes them."""


def modules_by_resource(*rows: RouteRows) -> Mapping[str, Sequence[str]]:
    """Return what has the rows of each resource, by its name."""
    modules: dict[str, list[str]] = {}
    for each in rows:
        for module, resources in each.modules.items():
            for resource in resources:
                modules.setdefault(resource, []).append(module)
    return modules
