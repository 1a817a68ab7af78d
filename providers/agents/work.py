"""The rows of a store that say that agents have something to do, whichever process does it."""

from typing import Final

from apis.storage.kv_store import KVStore

TURN_PREFIX: Final = "/agent_turn/"
AUTOMATION_PREFIX: Final = "/automation_due/"
ENVIRONMENT_PREFIX: Final = "/agent_environment_due/"


async def has_work(kv: KVStore) -> bool:
    """Return true if a turn, an automation or an environment waits in the store, also for a time to come."""
    for prefix in (TURN_PREFIX, AUTOMATION_PREFIX, ENVIRONMENT_PREFIX):
        if await kv.scan(prefix, limit=1):
            return True
    return False
