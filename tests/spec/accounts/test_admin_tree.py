"""Every method of the SDK's `client.admin`, found by walking over it: served, or refused by name with an alternative.

A failure here after an upgrade of the SDK shows the new methods: serve each, or add a row to `ABSENT_ADMINISTRATION`.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from openai import APIStatusError, AsyncOpenAI
from openai._resource import AsyncAPIResource

from stack.http.routes.absences import ABSENT_ADMINISTRATION, ABSENT_RESOURCES
from tests.support.servers.serving import serving
from tests.support.tenants.accounts import CHAINED, ROOT

VALUES: Final[dict[str, Any]] = {
    "start_time": 1,
    "limit": 3,
    "certificate_ids": ["cert_1"],
    "model_ids": ["m"],
    "mode": "allow_list",
    "retention_type": "none",
    "threshold_amount": 100,
}
"""Arguments that are no text, by their names; all others are a text, which an id may be."""
FEWEST_METHODS: Final = 120
REFUSED_AS_ABSENT: Final = "is not offered by this server. "


def methods_of(resource: AsyncAPIResource, path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the methods that send requests, of the resource and of those below it."""
    for name in sorted(vars(type(resource))):
        if name.startswith(("_", "with_")):
            continue
        value = getattr(resource, name)
        if isinstance(value, AsyncAPIResource):
            yield from methods_of(value, f"{path}.{name}")
        elif callable(value):
            yield f"{path}.{name}", value


def arguments_of(method: Callable[..., Any]) -> dict[str, Any]:
    """Return the required arguments, or all of them of a method that takes one of several sets."""
    parameters = [each for each in inspect.signature(method).parameters.values() if not each.name.startswith("extra_")]
    required = [each for each in parameters if each.default is inspect.Parameter.empty]
    has_variants = "variants" in inspect.getclosurevars(method).nonlocals
    return {each.name: VALUES.get(each.name, "x_1") for each in (parameters if has_variants else required)}


async def outcome_of(client: AsyncOpenAI, method: Callable[..., Any]) -> tuple[int, str]:
    """Call the method with the least that it takes; return the status and the error of the response."""
    try:
        await method(**{**arguments_of(method), "timeout": 10})
    except APIStatusError as exc:
        return exc.status_code, exc.message
    return 200, ""


async def test_every_method_of_the_admin_tree_is_served_or_refused_by_name() -> None:
    async with serving(more=CHAINED, server={"api_keys": [ROOT]}) as served:
        client = served.client.with_options(admin_api_key="sk-root", max_retries=0)
        outcomes = {name: await outcome_of(client, method) for name, method in methods_of(client.admin, "admin")}
    assert len(outcomes) >= FEWEST_METHODS, "the walk misses methods"
    unknown = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome[0] in (401, 403, 405) or outcome[0] >= 500 or "Unknown request URL" in outcome[1]
    }
    assert unknown == {}
    absent = {name for name, (_, message) in outcomes.items() if REFUSED_AS_ABSENT in message}
    of_organization = {name.split(".")[2] for name in absent if ".projects." not in name}
    assert of_organization <= ABSENT_ADMINISTRATION.keys()
    for served_name in (
        "admin.organization.audit_logs.list",
        "admin.organization.admin_api_keys.create",
        "admin.organization.projects.api_keys.update",
        "admin.organization.projects.model_permissions.update",
        "admin.organization.projects.hosted_tool_permissions.update",
        "admin.organization.projects.service_tier_settings.update",
        "admin.organization.projects.data_retention.update",
        "admin.organization.projects.service_accounts.create",
    ):
        assert served_name in outcomes.keys() - absent
    reasons = {*ABSENT_ADMINISTRATION.values(), ABSENT_RESOURCES["projects"]}
    for name in absent:
        assert any(reason in outcomes[name][1] for reason in reasons), outcomes[name]
