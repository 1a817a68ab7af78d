"""Routes below /v1/webhook_endpoints: the webhooks that tenants manage."""
