"""VaultAuthorization: the token of a vault that each request to an MCP server is sent with.

It is looked up for each request, so that a credential that was deleted, changed or renewed counts at once, and it is in
no record of the response.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

from openai.types.responses.mcp_tool_call_error import HTTPError

from apis.agents.tools import CONNECTOR_SCHEME
from apis.tool_servers import ToolServerFailed
from apis.vaults.vaults import TokenUse, Vaults
from apis.wire.tools import McpTool
from providers.responses.tools.tool_context import ToolContext

_Result = TypeVar("_Result")


class VaultAuthorization:
    """The authorization of one declared server, by the vaults that the request names."""

    def __init__(self, declaration: McpTool, context: ToolContext) -> None:
        self._declaration = declaration
        self._tenant = context.tenant
        self._use = _find_use(declaration, context.request.vault_ids)
        self._vaults: Vaults | None = context.vaults if self._use is not None else None

    async def use(self, send: Callable[[McpTool], Awaitable[_Result]]) -> _Result:
        """Return the result of `send`, which gets the declaration with its authorization; it is called again with
        another token if the server has refused the first one. Raises ToolFailed, also for a credential that cannot be
        used."""
        vaults, use = self._vaults, self._use
        if vaults is None or use is None:
            return await send(self._declaration)
        token = await vaults.find_token(use, tenant=self._tenant)
        if token is None:
            return await send(self._declaration)
        try:
            return await send(self._with_token(token))
        except ToolServerFailed as exc:
            if not _is_refusal(exc):
                raise
            other = await vaults.find_token(use, tenant=self._tenant, refused=token)
            if other is None:
                raise
        return await send(self._with_token(other))

    def _with_token(self, token: str) -> McpTool:
        return self._declaration.model_copy(update={"authorization": token})


def has_authorization(declaration: McpTool) -> bool:
    """Return True for a declaration with an authorization of its own."""
    names = {name.lower() for name in declaration.headers or {}}
    return declaration.authorization is not None or "authorization" in names


def _find_use(declaration: McpTool, vault_ids: list[str] | None) -> TokenUse | None:
    url = declaration.server_url
    if declaration.connector_id is not None:
        url = f"{CONNECTOR_SCHEME}{declaration.connector_id}"
    if url is None or not vault_ids or has_authorization(declaration):
        return None
    return TokenUse(vault_ids, url, declaration.credential_id)


def _is_refusal(exc: ToolServerFailed) -> bool:
    return isinstance(exc.error, HTTPError) and exc.error.code == HTTPStatus.UNAUTHORIZED
