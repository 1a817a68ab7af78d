"""The KVStore promises, kept by each of the stores."""

import pytest

from tests.conformance.kv_store import Backend, KVStorePromises, LastingPromises


class TestMemory(KVStorePromises):
    @pytest.fixture
    def backend(self, memory_backend: Backend) -> Backend:
        return memory_backend


class TestSQLite(KVStorePromises, LastingPromises):
    @pytest.fixture
    def backend(self, sqlite_backend: Backend) -> Backend:
        return sqlite_backend


class TestRedis(KVStorePromises, LastingPromises):
    @pytest.fixture
    def backend(self, redis_backend: Backend) -> Backend:
        return redis_backend


@pytest.mark.long
class TestRedisCluster(KVStorePromises, LastingPromises):
    @pytest.fixture
    def backend(self, redis_cluster_backend: Backend) -> Backend:
        return redis_cluster_backend


class TestPostgres(KVStorePromises, LastingPromises):
    @pytest.fixture
    def backend(self, postgres_backend: Backend) -> Backend:
        return postgres_backend
