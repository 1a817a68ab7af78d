"""Network policies of requests: whether a container may have one, and what its proxy gets of it."""

import re
from typing import Final

from apis.errors import InvalidRequest, Unsupported
from apis.wire.tools import DomainSecret, NetworkAllowlist, NetworkPolicy
from providers.common.secret_spellings import MAX_SECRETS_BYTES
from providers.tool_runtime.python.egress.environment import NETWORK_VARIABLES
from providers.tool_runtime.python.egress.rules import HostRule, HostRules
from providers.tool_runtime.python.egress.secrets import MIN_SECRET_CHARS
from providers.tool_runtime.python.egress.settings import NetworkSettings, SecretValue
from providers.tool_runtime.python.sandbox import ENVIRONMENT

_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SECRET_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_RESERVED_NAMES: Final = frozenset(name.upper() for name in (*ENVIRONMENT, *NETWORK_VARIABLES))
_PARAM: Final = "network_policy"


def check_network_policy(policy: NetworkAllowlist, reachable_hosts: HostRules | None) -> None:
    """Raise Unsupported or InvalidRequest, naming the field, for a policy that no container may have."""
    if reachable_hosts is None:
        message = (
            "A container has no network here: use the policy 'disabled', or name hosts in `egress.allowed_hosts` of "
            "the run config's tool runtime."
        )
        raise Unsupported(message, param=_PARAM, code="unsupported_value")
    rules: list[HostRule] = []
    for index, domain in enumerate(policy.allowed_domains):
        rule = _parse_domain(domain, f"{_PARAM}.allowed_domains[{index}]")
        if not reachable_hosts.cover(rule):
            raise InvalidRequest(
                f"Containers may not reach {domain}: it is not in `egress.allowed_hosts` of this server's run config.",
                param=f"{_PARAM}.allowed_domains[{index}]",
                code="invalid_value",
            )
        rules.append(rule)
    allowed, identities = HostRules(rules), set[tuple[str, str]]()
    for index, secret in enumerate(policy.domain_secrets or ()):
        field = f"{_PARAM}.domain_secrets[{index}]"
        _check_secret(secret, allowed, field)
        identity = (HostRule.parse(secret.domain).host, secret.name)
        if identity in identities:
            raise _wrong(f"{field}.name", "The domain has another secret of this name.")
        identities.add(identity)
    if sum(len(secret.value) for secret in policy.domain_secrets or ()) > MAX_SECRETS_BYTES:
        raise _wrong(f"{_PARAM}.domain_secrets", f"All secrets together have at most {MAX_SECRETS_BYTES} characters.")


def build_network_settings(policy: NetworkPolicy | None) -> NetworkSettings | None:
    """Return the settings of a checked policy, without its secrets; None for one without a network."""
    return NetworkSettings(policy.allowed_domains) if isinstance(policy, NetworkAllowlist) else None


def list_secrets(policy: NetworkPolicy | None) -> list[SecretValue]:
    """Return the secrets of a checked policy."""
    secrets = policy.domain_secrets if isinstance(policy, NetworkAllowlist) else None
    return [SecretValue(HostRule.parse(each.domain).host, each.name, each.value) for each in secrets or ()]


def _check_secret(secret: DomainSecret, allowed: HostRules, field: str) -> None:
    rule = _parse_domain(secret.domain, f"{field}.domain")
    if rule.has_wildcard or not allowed.cover(rule):
        raise _wrong(f"{field}.domain", "A secret belongs to one host that `allowed_domains` has, without a wildcard.")
    if not _VARIABLE_NAME.fullmatch(secret.name) or secret.name.upper() in _RESERVED_NAMES:
        raise _wrong(f"{field}.name", "A secret is named like an environment variable that the container does not use.")
    if len(secret.value) < MIN_SECRET_CHARS or not _SECRET_VALUE.fullmatch(secret.value):
        message = f"A secret has at least {MIN_SECRET_CHARS} characters of printable ASCII, and no blank at its ends."
        raise _wrong(f"{field}.value", message)


def _parse_domain(domain: str, field: str) -> HostRule:
    try:
        return HostRule.parse(domain)
    except ValueError:
        message = "A domain is a host such as example.com, or *.example.com for all below it: no URL and no port."
        raise _wrong(field, message) from None


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=field, code="invalid_value")
