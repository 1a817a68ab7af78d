"""ConfigAccounts: the keys of `server.api_keys` in the run config."""

from apis.accounts.accounts import Accounts, Caller, ConfiguredKeys, digest_key
from apis.provider import Provider


class ConfigAccounts(Accounts):
    """The keys of `server.api_keys`, which change with a restart. Without any, the server takes requests without a
    key."""

    class Config(Provider.Config):
        """There is nothing to set."""

    def __init__(self, config: Config, keys: ConfiguredKeys) -> None:
        self._callers = keys.callers

    async def authenticate(self, key: bytes) -> Caller | None:
        return self._callers.get(digest_key(key))

    async def find_caller(self, project_id: str, key_id: str) -> Caller | None:
        if not self._callers:
            return Caller(project_id)
        callers = self._callers.values()
        return next((each for each in callers if (each.tenant, each.key_id) == (project_id, key_id)), None)
