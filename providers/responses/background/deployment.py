"""BackgroundDeployment: what the background responses of a deployment share."""

from collections.abc import Sequence
from dataclasses import dataclass

from apis.fair_share import Tenants
from providers.responses.background.webhook_endpoints import WebhookEndpointOptions
from providers.responses.background.webhooks import Webhook
from providers.responses.background.workers import BackgroundConfig


@dataclass(frozen=True, slots=True)
class BackgroundDeployment:
    """Limits of background responses, the webhooks that are called at their ends, and the tenants that share both."""

    config: BackgroundConfig
    webhooks: Sequence[Webhook]
    webhook_endpoints: WebhookEndpointOptions
    tenants: Tenants
