"""AgentSecrets: the secrets of the MCP servers of agents, apart from what the records of agents and sessions show.

TENANT/agent_secrets/ID  those of an agent, or of a session and its subagents; absent where there are none
"""

from collections.abc import Sequence

from apis.storage.kv_store import KVStore, Op
from apis.vaults.vaults import Vaults
from providers.agents.descriptions import Json, has_split, join_secrets, split_secrets
from providers.agents.sealed_store import SealedStore


class AgentSecrets:
    """The secrets of all agents of one store: encrypted where the server has `vaults`."""

    def __init__(self, kv: KVStore, vaults: Vaults | None) -> None:
        self._sealed = SealedStore(kv, vaults)

    def split(self, tools: Sequence[Json], tenant: str, owner_id: str) -> tuple[list[Json], Sequence[Op]]:
        """Return the tools of an agent or of a session as its record has them, and the operations that store their
        secrets in place of the former ones."""
        without, secrets = split_secrets(tools)
        if not secrets:
            return without, self.build_delete(tenant, owner_id)
        return without, self._sealed.build_put(_key(tenant, owner_id), {"servers": secrets})

    async def join(self, agent: Json, tenant: str, owner_id: str) -> Json:
        """Return the fields of an agent with the secrets that are stored for it, or for its session. Raises
        StorageCorrupt."""
        if not has_split(agent["tools"]):
            return agent
        stored = await self._sealed.load(_key(tenant, owner_id))
        return {**agent, "tools": join_secrets(agent["tools"], stored["servers"])}

    def build_delete(self, tenant: str, owner_id: str) -> Sequence[Op]:
        """Return the operations that delete the secrets of an agent or of a session, if it has any."""
        return self._sealed.build_delete(_key(tenant, owner_id))


def _key(tenant: str, owner_id: str) -> str:
    return f"{tenant}/agent_secrets/{owner_id}"
