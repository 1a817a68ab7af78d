"""Keys of a run config next to keys that are stored: sections of a stack in which administrators create projects."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

from tests.support.servers.serving import Served, serving

CHAINED: Final[dict[str, Any]] = {
    "accounts": {
        "provider": "chain",
        "providers": {"config": {"provider": "config"}, "stored": {"provider": "stored"}},
    }
}
ROOT: Final = {"key": "sk-root", "tenant": "operator", "admin": True}


@asynccontextmanager
async def serving_accounts() -> AsyncGenerator[Served]:
    """Serve a stack with stored accounts, whose client has the administrator's key ROOT."""
    async with serving(more=CHAINED, server={"api_keys": [ROOT]}) as served:
        yield served
