"""Deployment: the named Python sessions of all processes of a machine that share a store, used from any of them."""

import asyncio
from collections.abc import Sequence
from inspect import signature

from apis.errors import NotFound, Overloaded, Unsupported
from providers.tool_runtime.python.messages import Operation, OperationRequest, P, R, build_operation_schema
from providers.tool_runtime.python.session_registry import SessionRegistry
from providers.tool_runtime.python.session_server import ServerDisconnected, SessionNotHere, call_server
from providers.tool_runtime.python.sessions import PythonSessionPool, SessionSettings


class SessionRouter:
    """What is kept here is used without asking anybody. Another process is waited for `patience_s` at most."""

    def __init__(self, sessions: PythonSessionPool, registry: SessionRegistry, timeout_s: float) -> None:
        self._sessions = sessions
        self._registry = registry
        self._timeout_s = timeout_s

    async def create_session(self, tenant: str, name: str, settings: SessionSettings) -> bool:
        """Keep a session here, and tell so. False when there is one already, wherever.

        Raises ToolFailed where there is no room, and StoreUnavailable where it cannot be told.
        """
        if self._sessions.has_session(tenant, name):
            return False
        key = self._sessions.create_session(tenant, name, settings)
        claimed = False
        try:
            claimed = await self._registry.claim_session(tenant, name, settings.idle_s)
        finally:
            if not claimed:
                self._sessions.end_session(key)
        if not self._sessions.has_session(tenant, name):  # its place was needed for others by then
            self._registry.release_session(tenant, name)
        return claimed

    async def call(self, tenant: str, name: str, operation: Operation[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the operation in the process that keeps the session.

        Raises NotFound where none does, Unsupported where it cannot be reached from here, and Overloaded where it
        ends meanwhile or does not answer.
        """
        if self._sessions.has_session(tenant, name):
            return await operation(*args, **kwargs)
        found = await self._registry.find_session(tenant, name)
        if found is None:
            raise container_not_found(name)
        if found.address is None:
            raise Unsupported(
                f"The container '{name:.256}' is kept on another machine of this deployment, or was until that ended. "
                "Send what is for it to that machine, or make a new one.",
                code="container_elsewhere",
            )
        request = OperationRequest(operation.__name__, tenant, name, _dump_arguments(operation, *args, **kwargs))
        try:
            return await call_server(found.address, request, operation, self._timeout_s)
        except SessionNotHere as exc:
            if exc.server_has_ended:
                self._sessions.record_loss((tenant, name, 0), "the server process that kept it has ended")
            await self._registry.delete_entries([found])
            raise container_not_found(name) from None
        except ServerDisconnected:
            message = "The process that kept this container ended before it answered: its variables and files are gone."
            raise Overloaded(message) from None

    async def call_all(self, tenant: str, operation: Operation[P, R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Do the operation in each process of this machine that keeps a session of the tenant, and in this one.

        Raises Overloaded where one does not answer.
        """
        found = await self._registry.list_other_entries(tenant)
        request = OperationRequest(operation.__name__, tenant, None, _dump_arguments(operation, *args, **kwargs))

        async def there(address: str) -> Sequence[R]:
            try:
                return [await call_server(address, request, operation, self._timeout_s)]
            except ServerDisconnected:
                return []
            except SessionNotHere:
                await self._registry.delete_entries([each for each in found if each.address == address])
                return []

        addresses = {each.address for each in found if each.address is not None}
        answers = await asyncio.gather(*(there(each) for each in sorted(addresses)))
        return [await operation(*args, **kwargs), *(each for some in answers for each in some)]


def container_not_found(container_id: str) -> NotFound:
    """What is said of an id of no container, and of another tenant's."""
    return NotFound(f"Container with id '{container_id:.256}' not found.")


def _dump_arguments(operation: Operation[P, R], /, *args: P.args, **kwargs: P.kwargs) -> dict[str, object]:
    """The arguments of a call by name, as they are sent."""
    form = build_operation_schema(operation)
    given = signature(operation).bind(*args, **kwargs).arguments
    return {name: form.arguments[name].dump_python(it) for name, it in given.items()}
