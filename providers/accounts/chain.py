"""ChainedAccounts: several providers of accounts as one."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from apis.accounts.accounts import Accounts, Caller
from apis.accounts.organization import Organization
from apis.accounts.sign_in import SignIn
from apis.provider import Provider
from providers.accounts.projects import StoredProjects


class ChainedAccounts(Accounts):
    """The keys of all its providers; the first one in their order that has a key decides. A provider that cannot read
    its keys refuses those that no provider before it has. Those with stored projects share one organization: prices,
    retention and e-mail may be set in any of their sections, and hold for all."""

    class Config(Provider.Config):
        """`providers` holds accounts sections by name."""

        providers: dict[str, dict[str, Any]] = Field(min_length=1)

    def __init__(self, config: Config, providers: Mapping[str, Accounts]) -> None:
        self._providers = tuple(providers.values())
        stored = {name: provider for name, provider in providers.items() if isinstance(provider, StoredProjects)}
        if len(stored) > 1:
            StoredProjects.share_organization(stored)

    async def authenticate(self, key: bytes) -> Caller | None:
        for provider in self._providers:
            if (caller := await provider.authenticate(key)) is not None:
                return caller
        return None

    async def find_caller(self, project_id: str, key_id: str) -> Caller | None:
        for provider in self._providers:
            if (caller := await provider.find_caller(project_id, key_id)) is not None:
                return caller
        return None

    async def find_owner(self, project_id: str, key_id: str) -> Caller | None:
        stored = next((each for each in self._providers if isinstance(each, StoredProjects)), None)
        if key_id or stored is None:
            return await super().find_owner(project_id, key_id)
        return await stored.find_owner(project_id, "")

    async def load_sign_in(self) -> SignIn | None:
        """Return that of the first provider that has one."""
        for provider in self._providers:
            if (sign_in := await provider.load_sign_in()) is not None:
                return sign_in
        return None

    def organization(self) -> Organization | None:
        """Return the one that its providers share."""
        return next((own for provider in self._providers if (own := provider.organization())), None)
