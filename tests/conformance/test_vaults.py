"""Vaults over every store: what two workers see of them, one renewal of a token, and keys that are replaced."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from apis.documents.fetcher import Fetcher, FetchRequest, FetchResponse, FetchStream
from apis.errors import InvalidRequest, StorageCorrupt
from apis.storage.kv_store import Delete, KVStore
from apis.vaults.requests import CreateCredential, CreateVault, UpdateCredential, UpdateVault, VaultListParams
from apis.vaults.vaults import TokenUse
from providers.vaults.kv import StoredVaults
from tests.conformance.kv_store import Backend
from tests.support.waiting import until

OLD = "the first key, which is thirty-two characters long"
NEW = "another key, which is thirty-two characters long"
URL = "https://wiki.example/mcp"
REFRESH = {
    "client_id": "client",
    "refresh_token": "refresh-1",
    "token_endpoint": "https://wiki.example/token",
    "token_endpoint_auth": {"type": "none"},
}


class TokenEndpoint(Fetcher):
    """A token endpoint that takes each refresh token once."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []

    async def fetch(self, request: FetchRequest) -> FetchResponse:
        self.bodies.append(request.body or b"")
        await asyncio.sleep(0)
        number = len(self.bodies) + 1
        body = b'{"access_token": "token-%d", "refresh_token": "refresh-%d", "expires_in": 3600}' % (number, number)
        return FetchResponse(request.url, 200, {}, body)

    def open(self, request: FetchRequest) -> AbstractAsyncContextManager[FetchStream]:
        raise NotImplementedError


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(f"{request.param}_backend")


def open_vaults(kv: KVStore, *keys: str, fetcher: Fetcher | None = None) -> StoredVaults:
    config = StoredVaults.Config.model_validate({"keys": keys, "max_credentials": 3})
    return StoredVaults(config, kv, fetcher or TokenEndpoint())


def bearer(token: str, host: str = "wiki") -> CreateCredential:
    auth = {"type": "static_bearer", "mcp_server_url": f"https://{host}.example/mcp", "token": token}
    return CreateCredential.model_validate({"name": host, "auth": auth})


async def test_two_workers_share_vaults_until_they_are_deleted(backend: Backend) -> None:
    kv = await backend.open()
    first, second = open_vaults(kv, OLD), open_vaults(await backend.open(), OLD)
    vault = await first.credentials.create_vault(CreateVault(name="one"), tenant="t")
    await second.credentials.update_vault(vault["id"], UpdateVault(name="two"), tenant="t")
    assert (await first.credentials.get_vault(vault["id"], tenant="t"))["name"] == "two"
    credentials: list[Any] = []
    for host in ("a", "b", "c"):
        request = bearer(f"token-{host}", host)
        credentials.append(await first.credentials.create_credential(vault["id"], request, tenant="t"))
    with pytest.raises(InvalidRequest):
        await second.credentials.create_credential(vault["id"], bearer("x", "d"), tenant="t")
    use = TokenUse([vault["id"]], "https://b.example/mcp")
    assert await second.find_token(use, tenant="t") == "token-b"
    assert await second.find_token(use, tenant="u") is None
    changes = UpdateCredential.model_validate({"auth": {"type": "static_bearer", "token": "other"}})
    await second.credentials.update_credential(vault["id"], credentials[1]["id"], changes, tenant="t")
    assert await first.find_token(use, tenant="t") == "other"
    await second.credentials.delete_credential(vault["id"], credentials[0]["id"], tenant="t")
    assert await first.list_existing([vault["id"], "vault_x"], tenant="t") == [vault["id"]]
    for _, entry in await kv.scan("t/vault_credential/"):
        assert b"token-" not in entry.value
    await first.credentials.delete_vault(vault["id"], tenant="t")
    assert (await second.credentials.list_vaults(VaultListParams(), tenant="t")).data == []
    assert [key for prefix in ("t/", "/vault_sealed/") for key, _ in await kv.scan(prefix)] == []


async def test_two_workers_renew_a_token_once(backend: Backend) -> None:
    endpoint = TokenEndpoint()
    workers = [open_vaults(await backend.open(), OLD, fetcher=endpoint) for _ in range(2)]
    vault = await workers[0].credentials.create_vault(CreateVault(), tenant="t")
    auth = {"type": "mcp_oauth", "mcp_server_url": URL, "access_token": "token-1", "refresh": REFRESH}
    request = CreateCredential.model_validate({"name": "n", "auth": auth})
    await workers[0].credentials.create_credential(vault["id"], request, tenant="t")
    use = TokenUse([vault["id"]], URL)
    tokens = [worker.find_token(use, tenant="t", refused="token-1") for worker in workers * 2]
    assert await asyncio.gather(*tokens) == ["token-2"] * 4
    assert len(endpoint.bodies) == 1
    assert await workers[1].find_token(use, tenant="t", refused="token-2") == "token-3"
    assert b"refresh_token=refresh-2" in endpoint.bodies[1]


async def test_a_new_key_takes_over_what_another_worker_has_written(backend: Backend) -> None:
    kv = await backend.open()
    vaults = open_vaults(kv, OLD)
    vault = await vaults.credentials.create_vault(CreateVault(), tenant="t")
    await vaults.credentials.create_credential(vault["id"], bearer("token-1"), tenant="t")
    assert await kv.write(vaults.build_put(b"confidential", "t/record"))
    assert await kv.write(vaults.build_put(b"other", "t/deleted"))
    await kv.write([Delete("t/deleted")])
    second = open_vaults(await backend.open(), NEW, OLD)
    await second.start()

    async def is_taken_over() -> bool:
        return (await second.describe_secrets()).endswith("(0) can still be decrypted")

    try:
        await until(is_taken_over)
    finally:
        await second.close()
    third = open_vaults(kv, NEW)
    assert await third.find_token(TokenUse([vault["id"]], URL), tenant="t") == "token-1"
    entry = await kv.get("t/record")
    assert entry is not None
    assert b"confidential" not in entry.value
    assert third.unseal(entry.value, "t/record") == b"confidential"
    with pytest.raises(StorageCorrupt):
        third.unseal(entry.value, "u/record")
    await kv.write(third.build_delete("t/record"))
    keys = [key for key, _ in await kv.scan("/vault_sealed/")]
    assert [key.rpartition("/")[2].partition("_")[0] for key in keys] == ["vcred"]
