"""The access of containers to hosts outside of their sandboxes, and the use that they have made of it."""

import asyncio
import ssl
from ipaddress import ip_network
from typing import TYPE_CHECKING

from apis.fair_share import FairShare
from providers.common.net.addresses import AddressPolicy
from providers.common.net.checked_hosts import CheckedHosts, HostResolver, SystemResolver
from providers.tool_runtime.python.egress.environment import build_environment
from providers.tool_runtime.python.egress.rules import HostRules
from providers.tool_runtime.python.egress.secrets import ContainerSecrets
from providers.tool_runtime.python.egress.settings import EgressCounts, EgressSettings, NetworkUse

if TYPE_CHECKING:
    from providers.tool_runtime.python.egress.authority import ContainerAuthority


class Egress:
    """The way out of all containers of a session server: what their proxies share."""

    def __init__(
        self, settings: EgressSettings, *, several_tenants: bool = False, resolve: HostResolver | None = None
    ) -> None:
        self.settings = settings
        self.rules = settings.rules()
        self._resolver = SystemResolver(several_tenants=several_tenants)
        policy = AddressPolicy(
            [ip_network(each) for each in settings.allowed_private_networks],
            [ip_network(each) for each in settings.denied_networks],
        )
        self.hosts = CheckedHosts(policy, resolve or self._resolver.resolve)
        self.places = FairShare("connections of containers", settings.max_connections, several_tenants=several_tenants)

    def close(self) -> None:
        """End the threads that resolve names."""
        self._resolver.close()


class ContainerAccess:
    """The access of one container. `environment` and `certificates` are what programs need to use it; `use` is
    bounded."""

    def __init__(
        self,
        egress: Egress,
        owner: tuple[str, str],
        rules: HostRules,
        secrets: ContainerSecrets,
        certificates: bytes,
        authority: "ContainerAuthority | None",
    ) -> None:
        """`owner` is the tenant and the name of the container."""
        self.egress = egress
        self.tenant, self.container = owner
        self.rules = rules
        self.environment = build_environment(secrets.variables())
        self.certificates = certificates
        self.use = NetworkUse()
        self.secrets = secrets
        self._authority = authority
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._counts = EgressCounts()

    async def server_context(self, host: str) -> ssl.SSLContext:
        """Return the context in which the proxy stands for a host that secrets belong to."""
        assert self._authority is not None, "a proxy that may get secrets has one"
        if host not in self._contexts:
            self._contexts[host] = await asyncio.to_thread(self._authority.build_server_context, host)
        return self._contexts[host]

    def count(self, counts: EgressCounts) -> bool:
        """Add to the counts; return False where the container has used up its bytes."""
        self._counts += counts
        self.use.total_bytes += counts.sent_bytes + counts.received_bytes
        return self.use.total_bytes <= self.egress.settings.container_bytes

    def take_counts(self) -> EgressCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, EgressCounts()
        return counts
