"""Redis servers of other kinds than a single one: clusters, sentinels, and writes that wait for replicas."""

from collections.abc import Iterator

import pytest

from apis.errors import ConfigError, StoreUnavailable
from apis.storage.kv_store import Put
from providers.kv_store.redis import Redis
from tests.support.servers.redis_group import RedisGroup, redis_cluster
from tests.support.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisGroup]:
    with redis_cluster(tmp_path_factory.mktemp("cluster"), masters=1, replicas=0) as group:
        yield group


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def open_store(url: str, **fields: object) -> Redis:
    store = Redis(Redis.Config.model_validate({"url": url, "timeout_s": 2, **fields}))
    await store.start()
    return store


async def test_a_store_in_a_cluster_has_all_its_keys_in_one_slot(cluster: RedisGroup) -> None:
    [server] = cluster.servers
    for prefix in ("stack:", "two:{tag}:"):
        store = await open_store(server.url, cluster=True, prefix=prefix)
        assert await store.write([Put("a/1", b"1"), Put("b/1", b"2", 60)]) is not None
        assert [key for key, _ in await store.scan("")] == ["a/1", "b/1"]
        await store.close()


async def test_the_kind_of_the_servers_is_what_the_config_says(cluster: RedisGroup, server: RedisServer) -> None:
    with pytest.raises(ConfigError, match="is a cluster: set `cluster: true`"):
        await open_store(cluster.servers[0].url)
    with pytest.raises(ConfigError, match="no cluster: leave `cluster` out"):
        await open_store(server.url, cluster=True)
    with pytest.raises(ConfigError, match="no sentinel"):
        await open_store(server.url, sentinel="mymaster")
    with pytest.raises(ConfigError, match="several hosts needs"):
        await open_store(f"redis://{server.host},{server.host}/0")


async def test_a_durable_write_fails_where_too_few_replicas_have_it(server: RedisServer) -> None:
    store = await open_store(server.url, min_replicas=1, timeout_s=1)
    with pytest.raises(StoreUnavailable, match="min_replicas"):
        await store.put("a", b"")
    await store.put("b", b"", durable=False)
    assert await store.write([Put("b", b"", expect=7)]) is None
    assert [key for key, _ in await store.scan("")] == ["a", "b"]
    await store.close()
