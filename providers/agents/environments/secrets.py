"""WorkspaceSecrets: the secrets of vaults for the programs of workspaces."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from apis.agents.environments import HostedConfiguration
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.vaults.vaults import Vaults
from apis.wire.tools import NetworkAllowlist, NetworkPolicy
from apis.workspaces import WorkspaceRequest, Workspaces
from providers.agents.environments.records import EnvironmentRef
from providers.agents.environments.specs import SpecReader
from providers.common.container_variables import add_variables
from providers.common.recent import RecentEntries

_MAX_NETWORKS: Final = 256


class WorkspaceSecrets:
    """Gives workspaces the secrets of vaults, for the hosts of their network: when they are made, and again before each
    response of a session, so that a credential that was changed or deleted counts for the next one."""

    def __init__(self, workspaces: Workspaces, specs: SpecReader, vaults: Vaults | None) -> None:
        self._workspaces = workspaces
        self._specs = specs
        self._vaults = vaults
        self._networks = RecentEntries[EnvironmentRef, tuple[NetworkPolicy | None, Collection[str]]](_MAX_NETWORKS)
        """The networks of environments that are in use, and the names of their variables, which never change."""

    async def add(
        self, policy: NetworkPolicy | None, taken: Collection[str], vault_ids: Sequence[str], *, tenant: str
    ) -> NetworkPolicy | None:
        """Return the network of a workspace with the secrets of vaults that have no name that is `taken`. Raises
        InvalidRequest where one cannot be used."""
        if self._vaults is None or not vault_ids or not isinstance(policy, NetworkAllowlist):
            return policy
        return await add_variables(policy, self._vaults, vault_ids, tenant=tenant, taken=taken)

    async def refresh(
        self, ref: EnvironmentRef, vault_ids: Sequence[str], load: Callable[[], Awaitable[HostedConfiguration]]
    ) -> str:
        """Give a workspace the secrets that vaults have now; `load` returns its configuration. Return why they cannot
        be used, or ""."""
        if self._vaults is None or not vault_ids:
            return ""
        network = self._networks.find(ref)
        try:
            if network is None:
                request: WorkspaceRequest = self._specs.build_request(ref.id, await load())
                self._networks[ref] = network = request.network_policy, frozenset(request.variables)
            policy = await self.add(*network, vault_ids, tenant=ref.tenant)
            if isinstance(policy, NetworkAllowlist):
                await self._workspaces.update_secrets(ref.workspace_id, policy, tenant=ref.tenant)
        except InvalidRequest as exc:
            return exc.message
        except (NotFound, Unsupported):
            pass  # the first command says why there is no workspace
        return ""
