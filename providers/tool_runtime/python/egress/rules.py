"""Rules for the hosts that containers reach: those of the run config bound those of a request."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from providers.common.net.host_names import is_address, text_to_host

WEB_PORTS: Final = (80, 443)


@dataclass(frozen=True, slots=True)
class HostRule:
    """A host, or with `has_wildcard` each name below it and not the host itself, and the ports that are open there."""

    host: str
    has_wildcard: bool = False
    ports: Sequence[int] = WEB_PORTS

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the rule of `example.com` or `*.example.com`. Raises ValueError for any other text."""
        has_wildcard = text.startswith("*.")
        host = text_to_host(text[2:] if has_wildcard else text)
        if has_wildcard and is_address(host):
            raise ValueError(text)
        return cls(host, has_wildcard)

    @classmethod
    def parse_with_port(cls, text: str) -> Self:
        """Return the rule of such a text, after which a port may stand: `example.com:8443` opens that one alone."""
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            return cls.parse(text)
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(text)
        rule = cls.parse(host)
        return cls(rule.host, rule.has_wildcard, (int(port),))

    def permits(self, host: str) -> bool:
        """Return whether the rule is about a host in canonical form."""
        return host.endswith(f".{self.host}") if self.has_wildcard else host == self.host

    def covers(self, other: "HostRule") -> bool:
        """Return whether the rule is about each host that the other one is about."""
        if self.has_wildcard and other.has_wildcard:
            return other.host == self.host or self.permits(other.host)
        return not other.has_wildcard and self.permits(other.host)


class HostRules:
    """Several rules, of which one suffices."""

    def __init__(self, rules: Iterable[HostRule]) -> None:
        self._rules = tuple(rules)

    def cover(self, other: HostRule) -> bool:
        """Return whether one of the rules covers another rule."""
        return any(rule.covers(other) for rule in self._rules)

    def list_domains(self) -> list[str]:
        """Return the domains of the rules, without their ports."""
        return [f"*.{rule.host}" if rule.has_wildcard else rule.host for rule in self._rules]

    def permit(self, host: str) -> bool:
        """Return whether a host in canonical form may be reached, at some port."""
        return any(rule.permits(host) for rule in self._rules)

    def open_ports(self, host: str) -> frozenset[int]:
        """Return the ports at which a host may be reached."""
        return frozenset(port for rule in self._rules if rule.permits(host) for port in rule.ports)
