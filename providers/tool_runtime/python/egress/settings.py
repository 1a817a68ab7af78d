"""Settings of the way out: those of the run config for all containers, and those of one container."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from providers.tool_runtime.python.egress.rules import HostRule, HostRules


@dataclass(frozen=True, slots=True)
class EgressSettings:
    """Hosts that containers may ever reach, and limits. The networks are as in an AddressPolicy; times are in seconds.
    `container_bytes` bounds both directions of one container together, for as long as it lives; `head_timeout_s` the
    head of a request, the first message of TLS, and each handshake."""

    allowed_hosts: Sequence[str] = ()
    allowed_private_networks: Sequence[str] = ()
    denied_networks: Sequence[str] = ()
    max_connections: int = 256
    max_container_connections: int = 32
    container_bytes: int = 1 << 30
    connect_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    connection_timeout_s: float = 600.0
    head_timeout_s: float = 10.0

    def rules(self) -> HostRules:
        """Return the rules of the allowed hosts."""
        return HostRules(map(HostRule.parse_with_port, self.allowed_hosts))


@dataclass(frozen=True, slots=True)
class SecretValue:
    """Secret of a container for one host: programs know a placeholder for it, in the variable `name`."""

    domain: str
    name: str
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """The hosts of one container, as its request named them."""

    allowed_domains: Sequence[str]


@dataclass(slots=True)
class NetworkUse:
    """Bytes of a container in both directions, since it was created: a sandbox that ended and began again has the same
    bound."""

    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EgressCounts:
    """Work of a proxy since it was counted last: connections to hosts, refusals, and bytes in both directions."""

    connections: int = 0
    refusals: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def __add__(self, other: "EgressCounts") -> "EgressCounts":
        return EgressCounts(
            self.connections + other.connections,
            self.refusals + other.refusals,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
        )
