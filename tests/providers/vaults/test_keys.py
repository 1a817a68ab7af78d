"""The keys of vaults: what is encrypted under which, and what is left without them."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from apis.errors import ToolFailed
from apis.vaults.requests import CreateCredential, CreateVault
from apis.vaults.vaults import TokenUse
from providers.fetcher.safe import GuardedFetcher
from providers.kv_store.memory import Memory
from providers.vaults.kv import StoredVaults

OLD = "the first key, which is thirty-two characters long"
NEW = "another key, which is thirty-two characters long"
URL = "https://wiki.example/mcp"


@asynccontextmanager
async def opened(kv: Memory, *keys: str) -> AsyncGenerator[StoredVaults]:
    vaults = StoredVaults(
        StoredVaults.Config.model_validate({"keys": keys}), kv, GuardedFetcher(GuardedFetcher.Config())
    )
    await vaults.start()
    try:
        yield vaults
    finally:
        await vaults.close()


async def store_token(vaults: StoredVaults, token: str) -> TokenUse:
    """Store a token in a vault of its own."""
    vault = await vaults.credentials.create_vault(CreateVault(), tenant="t")
    auth = {"type": "static_bearer", "mcp_server_url": URL, "token": token}
    request = CreateCredential.model_validate({"name": "n", "auth": auth})
    await vaults.credentials.create_credential(vault["id"], request, tenant="t")
    return TokenUse([vault["id"]], "https://WIKI.example:443/mcp/")


async def test_a_new_key_takes_over_all_records_and_the_old_one_may_leave(caplog: pytest.LogCaptureFixture) -> None:
    kv = Memory(Memory.Config())
    async with opened(kv, OLD) as vaults:
        uses = [await store_token(vaults, token) for token in ("token-1", "token-2")]
        assert (await vaults.describe_secrets()).endswith("(2)")
    async with opened(kv, NEW) as vaults:
        with caplog.at_level(logging.ERROR), pytest.raises(ToolFailed, match=r"`vaults\.keys`"):
            await vaults.find_token(uses[0], tenant="t")
        assert "LOST" in await vaults.describe_secrets()
    async with opened(kv, NEW, OLD) as vaults:
        async with asyncio.timeout(5):
            while not (await vaults.describe_secrets()).endswith("(0) can still be decrypted"):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
    async with opened(kv, NEW) as vaults:
        assert [await vaults.find_token(use, tenant="t") for use in uses] == ["token-1", "token-2"]
        assert "LOST" not in await vaults.describe_secrets()


async def test_equal_secrets_differ_in_the_store_and_belong_to_their_tenant() -> None:
    kv = Memory(Memory.Config())
    async with opened(kv, OLD) as vaults:
        use = await store_token(vaults, "one-token")
        await store_token(vaults, "one-token")
        rows = await kv.scan("t/vault_credential/", limit=10)
        sealed = {entry.value.partition(b'"data":')[2].partition(b"}")[0] for _, entry in rows}
        assert len(sealed) == 2
        for key, entry in rows:
            await kv.put(key.replace("t/", "u/", 1), entry.value)
        with pytest.raises(ToolFailed, match="not as it was written"):
            await vaults.find_token(use, tenant="u")


@pytest.mark.parametrize("where", ["key_id", "salt", "nonce", "data"])
async def test_a_changed_record_is_reported_and_not_used(where: str, caplog: pytest.LogCaptureFixture) -> None:
    kv = Memory(Memory.Config())
    async with opened(kv, OLD) as vaults:
        use = await store_token(vaults, "one-token")
        [(key, entry)] = await kv.scan("t/vault_credential/", limit=10)
        position = entry.value.index(f'"{where}":"'.encode()) + len(where) + 4
        changed: Any = bytearray(entry.value)
        changed[position] = ord("A") if changed[position] != ord("A") else ord("B")
        await kv.put(key, bytes(changed))
        with caplog.at_level(logging.ERROR), pytest.raises(ToolFailed):
            await vaults.find_token(use, tenant="t")
    assert "damaged" in caplog.text
    assert "one-token" not in caplog.text
