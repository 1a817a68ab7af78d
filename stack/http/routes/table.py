"""All routes below /v1, by the modules of their resources."""

from typing import Final

from stack.http.routes.absences import ABSENT_ROUTES
from stack.http.routes.agents import AGENT_ROUTES
from stack.http.routes.audio import AUDIO_ROUTES
from stack.http.routes.batches import BATCH_ROUTES
from stack.http.routes.chat import CHAT_ROUTES
from stack.http.routes.completions import COMPLETION_ROUTES
from stack.http.routes.console.overview import OVERVIEW_ROUTES
from stack.http.routes.console.page_images import PAGE_IMAGE_ROUTES
from stack.http.routes.containers import CONTAINER_ROUTES
from stack.http.routes.conversations import CONVERSATION_ROUTES
from stack.http.routes.decisions import DECISION_ROUTES, SYSTEM_ONE_ROUTES
from stack.http.routes.embeddings import EMBEDDING_ROUTES
from stack.http.routes.files import FILE_ROUTES
from stack.http.routes.images import IMAGE_ROUTES
from stack.http.routes.listings import LISTING_ROUTES
from stack.http.routes.messages import MESSAGE_ROUTES
from stack.http.routes.models import MODEL_ROUTES
from stack.http.routes.moderations import MODERATION_ROUTES
from stack.http.routes.organization.own_key import OWN_KEY_ROUTES
from stack.http.routes.organization.table import (
    ORGANIZATION_EXTENSION_ROUTES,
    ORGANIZATION_ROUTES,
    REFUSED_ORGANIZATION_ROUTES,
)
from stack.http.routes.responses import RESPONSE_ROUTES
from stack.http.routes.skills import SKILL_ROUTES
from stack.http.routes.traces import TRACE_ROUTES
from stack.http.routes.uploads import UPLOAD_ROUTES
from stack.http.routes.vector_stores import VECTOR_STORE_ROUTES
from stack.http.routes.webhook_endpoints import WEBHOOK_ENDPOINT_ROUTES

API_ROUTES: Final = (
    *RESPONSE_ROUTES,
    *CHAT_ROUTES,
    *COMPLETION_ROUTES,
    *EMBEDDING_ROUTES,
    *DECISION_ROUTES,
    *MODERATION_ROUTES,
    *IMAGE_ROUTES,
    *AUDIO_ROUTES,
    *MODEL_ROUTES,
    *CONVERSATION_ROUTES,
    *AGENT_ROUTES,
    *FILE_ROUTES,
    *VECTOR_STORE_ROUTES,
    *CONTAINER_ROUTES,
    *UPLOAD_ROUTES,
    *BATCH_ROUTES,
    *WEBHOOK_ENDPOINT_ROUTES,
    *ORGANIZATION_ROUTES,
    *SKILL_ROUTES,
)
"""The routes of OpenAI's API, each served with and without the prefix /v1."""
EXTENSION_ROUTES: Final = (
    *MESSAGE_ROUTES,
    *SYSTEM_ONE_ROUTES,
    *LISTING_ROUTES,
    *OVERVIEW_ROUTES,
    *PAGE_IMAGE_ROUTES,
    *TRACE_ROUTES,
    *ORGANIZATION_EXTENSION_ROUTES,
    *OWN_KEY_ROUTES,
)
"""Routes that OpenAI's API does not have."""
REFUSED_ROUTES: Final = (*REFUSED_ORGANIZATION_ROUTES, *(route for row in ABSENT_ROUTES for route in row.to_routes()))
"""Routes of other servers that answer with the reason why they are not offered; no document describes them."""
