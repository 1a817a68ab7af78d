"""RequestContainer: the container in which the calls of one request run, the same one along a conversation."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, cast

from apis.containers import Container, Containers, CreateContainer
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.wire.items import Item
from apis.wire.tool_items import CodeInterpreterCallItem, ShellCallItem
from apis.wire.tools import DomainSecret, NetworkAllowlist
from providers.common.container_variables import add_variables
from providers.responses.tools.container.message_files import (
    MessageFile,
    copy_message_files,
    find_message_files,
    has_message_files,
)
from providers.responses.tools.tool_context import ToolContext

_MESSAGE_FILES_NOTICE: Final = " Files of the user's messages are in the current folder, /mnt/data, under their names."
_MAX_CONTAINER_LOOKUPS: Final = 10
"""Maximum containers of a conversation that are looked up, newest first; each look-up may ask another process."""


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """Call of the conversation that ran in a container, and whether it may have left state there."""

    container_id: str | None
    has_run: bool


@dataclass(frozen=True, slots=True)
class _ContainerChoice:
    """The container of a request's calls.

    `new_container` creates it if it does not exist. `was_never_created` is true before its first call. `is_state_lost`
    is true if the model still has to learn that the state of its earlier calls is gone.
    """

    id: str
    new_container: CreateContainer | None = None
    was_never_created: bool = False
    is_state_lost: bool = False


class RequestContainer:
    """The container that `declared` names, the newest that still exists of a conversation's `read_call`s, or a new one.

    `field` is the field that declares it. `check` chooses the container, and comes before everything else.
    """

    _choice: _ContainerChoice

    def __init__(
        self,
        declared: str | CreateContainer,
        read_call: Callable[[Item], EarlierCall | None],
        context: ToolContext,
        containers: Containers,
        field: str,
    ) -> None:
        self._requested = self._declared = declared
        self._read_call = read_call
        self._context = context
        self._containers = containers
        self._field = field
        self._tenant = context.tenant
        self._copied_keys: set[str] = set()
        self._setup_digest = ""
        self._variables: frozenset[str] | None = None
        """The names of the secrets of vaults; None where the request names no vault for a network."""
        self._network_notice = describe_network(())
        self._creation_lock = asyncio.Lock()
        self._idle_minutes: int | None = None
        """Minutes without a call after which the container ends, once it is there."""
        self._message_files: Sequence[MessageFile] | None = None

    @property
    def id(self) -> str:
        """The container's id, which it has before it is created."""
        return self._choice.id

    @property
    def description(self) -> str:
        """Text for the tool's description: what programs may reach, and where the files of messages are."""
        return self._network_notice + (_MESSAGE_FILES_NOTICE if has_message_files(self._context.items) else "")

    @property
    def state(self) -> dict[str, Any]:
        """The JSON value to record with a call's result: which files have been copied into the container."""
        state: dict[str, Any] = {"container_id": self.id, "file_ids": sorted(self._copied_keys)}
        if self._variables:
            state["variables"] = sorted(self._variables)
        return {**state, "setup": self._setup_digest} if self._setup_digest else state

    async def check(self) -> None:
        """Choose the container. Raises NotFound, Unsupported or InvalidRequest, with the field's name, for one that
        cannot be used or created."""
        self._declared, self._variables = await self._with_variables(self._requested)
        self._setup_digest = "" if isinstance(self._declared, str) else _digest_setup(self._declared, self._variables)
        self._choice = chosen = await self._choose()
        for state in self._recorded_states(chosen.id):
            self._copied_keys |= {*state["file_ids"]}
        if chosen.new_container is None:
            return
        try:
            await self._containers.check(chosen.new_container, tenant=self._tenant)
        except (Unsupported, NotFound, InvalidRequest) as exc:
            exc.param = f"{self._field}.{exc.param}"
            raise

    async def prepare(self) -> str:
        """Create the container for the first call, and copy the files into it that are not there yet. Return a notice
        for the model of the files of messages, or "". Raises StackError where it cannot be used."""
        async with self._creation_lock:
            await self._ensure_exists()
            return await self._copy_message_files()

    def find_expiry(self) -> int | None:
        """Return the time at which the container ends if nothing uses it from now on, in seconds since 1970; None
        before its first call, and for one that does not expire."""
        return None if self._idle_minutes is None else int(time.time()) + 60 * self._idle_minutes

    def take_state_loss(self) -> bool:
        """Return, once, whether the model still has to learn that the state of its earlier calls is gone."""
        is_state_lost = self._choice.is_state_lost
        self._choice = replace(self._choice, is_state_lost=False)
        return is_state_lost

    async def _with_variables(
        self, declared: str | CreateContainer
    ) -> tuple[str | CreateContainer, frozenset[str] | None]:
        """Return the container with the secrets of the request's vaults for the hosts of its network, and their names.
        Raises InvalidRequest where one cannot be used."""
        vaults, vault_ids = self._context.vaults, self._context.request.vault_ids
        policy = None if isinstance(declared, str) else declared.network_policy
        if vaults is None or not vault_ids or isinstance(declared, str) or not isinstance(policy, NetworkAllowlist):
            return declared, None
        own_names = {secret.name for secret in policy.domain_secrets or ()}
        policy = await add_variables(policy, vaults, vault_ids, tenant=self._tenant)
        names = frozenset(secret.name for secret in policy.domain_secrets or ()) - own_names
        return declared.model_copy(update={"network_policy": policy}), names

    async def _choose(self) -> _ContainerChoice:
        declared = self._declared
        if isinstance(declared, str):
            try:
                container = await self._containers.get(declared, tenant=self._tenant)
            except (NotFound, Unsupported) as exc:
                exc.param = self._field
                raise
            policy = container.network_policy
            self._network_notice = describe_network((policy.allowed_domains if policy else None) or ())
            return _ContainerChoice(declared)
        policy = declared.network_policy
        if isinstance(policy, NetworkAllowlist):
            self._network_notice = describe_network(policy.allowed_domains, policy.domain_secrets or ())
        items = self._context.items
        positions = reversed(items.positions(CodeInterpreterCallItem, ShellCallItem))
        earlier = [call for at in positions if (call := self._read_call(items.items[at])) is not None]
        container_ids = dict.fromkeys(call.container_id for call in earlier if call.container_id)
        fitting_ids = (container_id for container_id in container_ids if self._has_same_setup(container_id))
        for container_id in islice(fitting_ids, _MAX_CONTAINER_LOOKUPS):
            # an unreachable container counts as deleted
            with suppress(NotFound, Unsupported):
                await self._containers.get(container_id, tenant=self._tenant)
                return _ContainerChoice(container_id, declared)
        return _ContainerChoice(
            f"cntr_{secrets.token_hex(16)}",
            declared,
            was_never_created=True,
            is_state_lost=any(call.has_run for call in earlier),
        )

    def _has_same_setup(self, container_id: str) -> bool:
        """Return whether a container was created with the skills and the network of this request, and with at least the
        variables of its vaults: none of them changes."""
        first = next(self._recorded_states(container_id), dict[str, Any]())
        variables = self._variables or frozenset()
        return first.get("setup", "") == self._setup_digest and variables <= {*first.get("variables", ())}

    def _recorded_states(self, container_id: str) -> Iterator[dict[str, Any]]:
        """Yield the `state` that earlier calls in a container recorded."""
        for tool_result in self._context.tool_results.values():
            state: Any = tool_result.state
            if isinstance(state, dict) and "container_id" in state and state["container_id"] == container_id:
                yield cast(dict[str, Any], state)

    async def _ensure_exists(self) -> None:
        """Create the container if necessary, and copy the files that the request names into it."""
        chosen, tenant = self._choice, self._tenant
        file_ids = (chosen.new_container.file_ids if chosen.new_container else None) or []
        if not chosen.was_never_created and await self._exists():
            current, _ = await self._with_variables(self._requested)
            policy = None if isinstance(current, str) else current.network_policy
            if isinstance(policy, NetworkAllowlist) and (policy.domain_secrets or self._variables is not None):
                await self._containers.update_secrets(chosen.id, policy, tenant=tenant)
            for file_id in file_ids:
                if file_id not in self._copied_keys:
                    await self._containers.copy_file(chosen.id, file_id, tenant=tenant)
        elif chosen.new_container is not None:
            self._read_expiry(
                await self._containers.create(chosen.new_container, tenant=tenant, container_id=chosen.id)
            )
            self._copied_keys.clear()
            self._choice = replace(
                chosen, was_never_created=False, is_state_lost=chosen.is_state_lost or not chosen.was_never_created
            )
        self._copied_keys |= {*file_ids}

    async def _copy_message_files(self) -> str:
        """Copy the files of the messages that are not there yet, and return a notice for the model, or ""."""
        if self._message_files is None:
            self._message_files = await asyncio.to_thread(find_message_files, self._context.items)
        files = [file for file in self._message_files if file.key not in self._copied_keys]
        notice = await copy_message_files(files, self._containers, self.id, tenant=self._tenant)
        self._copied_keys |= {file.key for file in files}
        return notice

    async def _exists(self) -> bool:
        """Return False for a container that can be replaced. Raises NotFound for one that the request names."""
        try:
            self._read_expiry(await self._containers.get(self.id, tenant=self._tenant))
        except NotFound:
            if self._choice.new_container is None:
                raise
            return False
        return True

    def _read_expiry(self, container: Container) -> None:
        self._idle_minutes = container.expires_after.minutes if container.expires_after else None


def describe_network(domains: Sequence[str], secrets: Sequence[DomainSecret] = ()) -> str:
    """Return the part of a tool's description about what programs in a container may reach."""
    if not domains:
        return " There is no network."
    hosts = " By HTTP and HTTPS, through the proxy of their environment, programs reach these hosts alone: "
    hosts += f"{', '.join(domains)}."
    if not secrets:
        return hosts
    names = ", ".join(f"{secret.name} ({secret.domain})" for secret in secrets)
    return (
        f"{hosts} These environment variables hold placeholders of secrets, to be sent in headers of HTTPS requests to "
        f"their hosts, such as `Authorization: Bearer ${secrets[0].name}`: {names}."
    )


def _digest_setup(request: CreateContainer, variables: frozenset[str] | None) -> str:
    """Return a text that is equal for equal skills and networks; "" for none. It does not depend on secret values, and
    not on the `variables` of vaults, which may be deleted."""
    declared = [skill.model_dump_json() for skill in request.skills or ()]
    policy = request.network_policy
    if isinstance(policy, NetworkAllowlist):
        declared.append(policy.model_dump_json())
        own = (secret for secret in policy.domain_secrets or () if secret.name not in (variables or ()))
        declared += sorted(f"{secret.domain} {secret.name}" for secret in own)
    return hashlib.sha256("\n".join(declared).encode(errors="surrogatepass")).hexdigest()[:32] if declared else ""
