"""Deployment: the named Python sessions of all processes of a machine that share a store, used from any of them."""

import asyncio
from collections.abc import Sequence
from inspect import signature

from apis.errors import NotFound, Overloaded, Unsupported
from providers.tool_runtime.python.messages import Operation, P, R, Request, form_of
from providers.tool_runtime.python.session_registry import Directory
from providers.tool_runtime.python.session_server import BrokeOff, NotKept, ask
from providers.tool_runtime.python.sessions import Sessions, Terms


class Deployment:
    """What is kept here is used without asking anybody. Another process is waited for `patience_s` at most."""

    def __init__(self, sessions: Sessions, directory: Directory, patience_s: float) -> None:
        self._sessions = sessions
        self._directory = directory
        self._patience_s = patience_s

    async def make(self, tenant: str, name: str, terms: Terms) -> bool:
        """Keep a session here, and tell so. False when there is one already, wherever.

        Raises ToolFailed where there is no room, and StoreUnavailable where it cannot be told.
        """
        if self._sessions.has(tenant, name):
            return False
        key = self._sessions.create(tenant, name, terms)
        claimed = False
        try:
            claimed = await self._directory.claim(tenant, name, terms.idle_s)
        finally:
            if not claimed:
                self._sessions.drop(key)
        if not self._sessions.has(tenant, name):  # its place was needed for others by then
            self._directory.release(tenant, name)
        return claimed

    async def do(self, tenant: str, name: str, operation: Operation[P, R], /, *args: P.args, **named: P.kwargs) -> R:
        """Do the operation in the process that keeps the session.

        Raises NotFound where none does, Unsupported where it cannot be reached from here, and Overloaded where it
        ends meanwhile or does not answer.
        """
        if self._sessions.has(tenant, name):
            return await operation(*args, **named)
        found = await self._directory.find(tenant, name)
        if found is None:
            raise unknown(name)
        if found.address is None:
            raise Unsupported(
                f"The container '{name:.256}' is kept on another machine of this deployment, or was until that ended. "
                "Send what is for it to that machine, or make a new one.",
                code="container_elsewhere",
            )
        request = Request(operation.__name__, tenant, name, _plain(operation, *args, **named))
        try:
            return await ask(found.address, request, operation, self._patience_s)
        except NotKept as exc:
            if exc.has_ended:
                self._sessions.mourn((tenant, name, 0), "the server process that kept it has ended")
            await self._directory.forget([found])
            raise unknown(name) from None
        except BrokeOff:
            message = "The process that kept this container ended before it answered: its variables and files are gone."
            raise Overloaded(message) from None

    async def everywhere(self, tenant: str, operation: Operation[P, R], /, *args: P.args, **named: P.kwargs) -> list[R]:
        """Do the operation in each process of this machine that keeps a session of the tenant, and in this one.

        Raises Overloaded where one does not answer.
        """
        found = await self._directory.of(tenant)
        request = Request(operation.__name__, tenant, None, _plain(operation, *args, **named))

        async def there(address: str) -> Sequence[R]:
            try:
                return [await ask(address, request, operation, self._patience_s)]
            except BrokeOff:
                return []
            except NotKept:
                await self._directory.forget([each for each in found if each.address == address])
                return []

        addresses = {each.address for each in found if each.address is not None}
        answers = await asyncio.gather(*(there(each) for each in sorted(addresses)))
        return [await operation(*args, **named), *(each for some in answers for each in some)]


def unknown(name: str) -> NotFound:
    """What is said of an id of no container, and of another tenant's."""
    return NotFound(f"Container with id '{name:.256}' not found.")


def _plain(operation: Operation[P, R], /, *args: P.args, **named: P.kwargs) -> dict[str, object]:
    """The arguments of a call by name, as they are sent."""
    form = form_of(operation)
    given = signature(operation).bind(*args, **named).arguments
    return {name: form.arguments[name].dump_python(it) for name, it in given.items()}
