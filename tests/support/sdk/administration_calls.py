"""Every call of the SDK's `admin.organization` and `webhooks` that the stack serves, by name, to record requests."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from openai import AsyncOpenAI

_ALERT: Final[dict[str, Any]] = {
    "currency": "USD",
    "interval": "month",
    "threshold_amount": 100,
    "notification_channel": {"type": "email", "recipients": ["team@example.org"], "subject_prefix": "[stack]"},
}


def _organization(client: AsyncOpenAI) -> Any:
    return client.with_options(admin_api_key="none").admin.organization


def _projects(client: AsyncOpenAI) -> Any:
    return _organization(client).projects


ADMINISTRATION_CALLS: Final[dict[str, Callable[[AsyncOpenAI], Awaitable[Any]]]] = {
    "create a project": lambda client: _projects(client).create(name="p"),
    "list projects": lambda client: _projects(client).list(limit=3, after="proj_1", include_archived=True),
    "retrieve a project": lambda client: _projects(client).retrieve("proj_1"),
    "update a project": lambda client: _projects(client).update("proj_1", name="q"),
    "archive a project": lambda client: _projects(client).archive("proj_1"),
    "list the keys of a project": lambda client: _projects(client).api_keys.list("proj_1", limit=3),
    "retrieve a key": lambda client: _projects(client).api_keys.retrieve("key_1", project_id="proj_1"),
    "update a key": lambda client: _projects(client).api_keys.update(
        "key_1", project_id="proj_1", scopes=["read"], expires_in_seconds=60
    ),
    "delete a key": lambda client: _projects(client).api_keys.delete("key_1", project_id="proj_1"),
    "create a service account": lambda client: _projects(client).service_accounts.create(
        "proj_1", name="a", expires_in_seconds=60
    ),
    "list service accounts": lambda client: _projects(client).service_accounts.list("proj_1", limit=3),
    "retrieve a service account": lambda client: _projects(client).service_accounts.retrieve(
        "svc_acct_1", project_id="proj_1"
    ),
    "update a service account": lambda client: _projects(client).service_accounts.update(
        "svc_acct_1", project_id="proj_1", name="b"
    ),
    "delete a service account": lambda client: _projects(client).service_accounts.delete(
        "svc_acct_1", project_id="proj_1"
    ),
    "create a key": lambda client: _projects(client).service_accounts.api_keys.create(
        "svc_acct_1", project_id="proj_1", name="k", scopes=["read"]
    ),
    "list limits": lambda client: _projects(client).rate_limits.list_rate_limits("proj_1", limit=3, before="rl-m"),
    "set a limit": lambda client: _projects(client).rate_limits.update_rate_limit(
        "rl-m", project_id="proj_1", max_requests_per_1_minute=3
    ),
    "list usage": lambda client: _organization(client).usage.completions(
        start_time=1, end_time=100_000, bucket_width="1h", limit=3
    ),
    "retrieve model permissions": lambda client: _projects(client).model_permissions.retrieve("proj_1"),
    "update model permissions": lambda client: _projects(client).model_permissions.update(
        "proj_1", mode="allow_list", model_ids=["m"]
    ),
    "delete model permissions": lambda client: _projects(client).model_permissions.delete("proj_1"),
    "retrieve tool permissions": lambda client: _projects(client).hosted_tool_permissions.retrieve("proj_1"),
    "update tool permissions": lambda client: _projects(client).hosted_tool_permissions.update(
        "proj_1", mcp={"enabled": False}
    ),
    "retrieve tier settings": lambda client: _projects(client).service_tier_settings.retrieve("proj_1"),
    "update tier settings": lambda client: _projects(client).service_tier_settings.update(
        "proj_1", default="fast", enabled_tiers=["fast"]
    ),
    "retrieve data retention": lambda client: _projects(client).data_retention.retrieve("proj_1"),
    "update data retention": lambda client: _projects(client).data_retention.update("proj_1", retention_type="none"),
    "list audit logs": lambda client: _organization(client).audit_logs.list(
        limit=3, event_types=["project.created"], effective_at={"gte": 1}
    ),
    "list the usage of embeddings": lambda client: _organization(client).usage.embeddings(start_time=1, limit=3),
    "list the usage of decisions": lambda client: _organization(client).usage.decisions(start_time=1, limit=3),
    "list the usage of moderations": lambda client: _organization(client).usage.moderations(start_time=1, limit=3),
    "list the usage of images": lambda client: _organization(client).usage.images(start_time=1, limit=3),
    "list web searches": lambda client: _organization(client).usage.web_search_calls(start_time=1, limit=3),
    "list file searches": lambda client: _organization(client).usage.file_search_calls(start_time=1, limit=3),
    "list costs": lambda client: _organization(client).usage.costs(start_time=1, limit=3),
    "read the spend limit": lambda client: _organization(client).spend_limit.retrieve(),
    "set the spend limit": lambda client: _organization(client).spend_limit.update(
        currency="USD", interval="month", threshold_amount=100
    ),
    "delete the spend limit": lambda client: _organization(client).spend_limit.delete(),
    "read the spend limit of a project": lambda client: _projects(client).spend_limit.retrieve("proj_1"),
    "set the spend limit of a project": lambda client: _projects(client).spend_limit.update(
        "proj_1", currency="USD", interval="month", threshold_amount=100
    ),
    "delete the spend limit of a project": lambda client: _projects(client).spend_limit.delete("proj_1"),
    "create a spend alert": lambda client: _organization(client).spend_alerts.create(**_ALERT),
    "list spend alerts": lambda client: _organization(client).spend_alerts.list(
        after="alert_1", before="alert_2", limit=3, order="desc"
    ),
    "retrieve a spend alert": lambda client: _organization(client).spend_alerts.retrieve("alert_1"),
    "update a spend alert": lambda client: _organization(client).spend_alerts.update("alert_1", **_ALERT),
    "delete a spend alert": lambda client: _organization(client).spend_alerts.delete("alert_1"),
    "create a spend alert of a project": lambda client: _projects(client).spend_alerts.create("proj_1", **_ALERT),
    "list the spend alerts of a project": lambda client: _projects(client).spend_alerts.list("proj_1", limit=3),
    "retrieve a spend alert of a project": lambda client: _projects(client).spend_alerts.retrieve(
        "alert_1", project_id="proj_1"
    ),
    "update a spend alert of a project": lambda client: _projects(client).spend_alerts.update(
        "alert_1", project_id="proj_1", **_ALERT
    ),
    "delete a spend alert of a project": lambda client: _projects(client).spend_alerts.delete(
        "alert_1", project_id="proj_1"
    ),
    "create an administrator's key": lambda client: _organization(client).admin_api_keys.create(name="k"),
    "list administrators' keys": lambda client: _organization(client).admin_api_keys.list(limit=3, order="desc"),
    "retrieve an administrator's key": lambda client: _organization(client).admin_api_keys.retrieve("key_1"),
    "delete an administrator's key": lambda client: _organization(client).admin_api_keys.delete("key_1"),
}


WEBHOOK_CALLS: Final[dict[str, Callable[[AsyncOpenAI], Awaitable[Any]]]] = {
    "create a webhook endpoint": lambda client: client.webhooks.create(
        name="n", url="https://example.com/hook", event_types=["response.completed"]
    ),
    "list webhook endpoints": lambda client: client.webhooks.list(limit=3, after="we_1"),
    "retrieve a webhook endpoint": lambda client: client.webhooks.retrieve("we_1"),
    "update a webhook endpoint": lambda client: client.webhooks.update("we_1", name="m"),
    "delete a webhook endpoint": lambda client: client.webhooks.delete("we_1"),
    "rotate a webhook secret": lambda client: client.webhooks.rotate_secret(
        "we_1", keep_old_secret_active_for_24_hours=True
    ),
    "send a test event": lambda client: client.webhooks.test("we_1", event_type="batch.completed"),
    "list webhook event types": lambda client: client.webhooks.event_types.list(),
}
