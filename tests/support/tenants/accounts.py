"""Keys of a run config next to keys that are stored: sections of a stack in which administrators create projects."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from openai import AsyncOpenAI

from apis.accounts.accounts import Accounts
from providers.accounts.organization import StoredOrganization
from stack.build import find_organization
from tests.support.servers.serving import Served, serving

CHAINED: Final[dict[str, Any]] = {
    "accounts": {
        "provider": "chain",
        "providers": {"config": {"provider": "config"}, "stored": {"provider": "stored"}},
    }
}
ROOT: Final = {"key": "sk-root", "tenant": "operator", "admin": True}


@asynccontextmanager
async def serving_accounts() -> AsyncGenerator[Served]:
    """Serve a stack with stored accounts, whose client has the administrator's key ROOT."""
    async with serving(more=CHAINED, server={"api_keys": [ROOT]}) as served:
        yield served


def stored_organization(accounts: Accounts) -> StoredOrganization:
    """Return what these accounts keep of their projects."""
    organization = find_organization(accounts)
    assert organization is not None
    return organization


def organization_of(client: AsyncOpenAI, admin_key: str = "sk-root") -> Any:
    """Return `admin.organization` of the SDK with the key of an administrator, by default that of ROOT."""
    return client.with_options(admin_api_key=admin_key).admin.organization


async def new_project(organization: Any, limits: Mapping[str, int] | None = None) -> tuple[str, str]:
    """Create a project with a key, with limits of all its requests together; return its id and the key."""
    project = await organization.projects.create(name="p")
    if limits is not None:
        await organization.projects.rate_limits.update_rate_limit("rl-*", project_id=project.id, extra_body=limits)
    account = await organization.projects.service_accounts.create(project.id, name="app")
    return project.id, account.api_key.value


def usage_results(page: Any) -> list[Any]:
    """Return the results of all buckets of a page of usage."""
    return [result for bucket in page.data for result in bucket.results]


def sum_usage(page: Any) -> tuple[int, int, int]:
    """Return the requests to models, the input tokens and the output tokens of a page of `usage.completions`."""
    results = usage_results(page)
    return (
        sum(result.num_model_requests for result in results),
        sum(result.input_tokens for result in results),
        sum(result.output_tokens for result in results),
    )
