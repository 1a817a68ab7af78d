"""All routes below /v1/organization, with the actor of each change."""

from typing import Final

from stack.http.routes.organization.audit_logs import AUDIT_LOG_ROUTES, with_actor
from stack.http.routes.organization.erasure import ERASURE_ROUTES
from stack.http.routes.organization.keys import KEY_ROUTES
from stack.http.routes.organization.permissions import PERMISSION_ROUTES
from stack.http.routes.organization.projects import PROJECT_ROUTES
from stack.http.routes.organization.rate_limits import RATE_LIMIT_ROUTES
from stack.http.routes.organization.spend_alerts import SPEND_ALERT_ROUTES
from stack.http.routes.organization.spending import SPENDING_ROUTES
from stack.http.routes.organization.usage import REFUSED_USAGE_ROUTES, USAGE_ROUTES

ORGANIZATION_ROUTES: Final = with_actor(
    (
        *PROJECT_ROUTES,
        *KEY_ROUTES,
        *RATE_LIMIT_ROUTES,
        *PERMISSION_ROUTES,
        *USAGE_ROUTES,
        *SPENDING_ROUTES,
        *SPEND_ALERT_ROUTES,
        *AUDIT_LOG_ROUTES,
    )
)
"""The routes of OpenAI's administration API."""
ORGANIZATION_EXTENSION_ROUTES: Final = with_actor(ERASURE_ROUTES)
"""Routes of administration that OpenAI's API does not have."""
REFUSED_ORGANIZATION_ROUTES: Final = REFUSED_USAGE_ROUTES
"""Routes of OpenAI's administration API that answer with the reason why they are not offered."""
