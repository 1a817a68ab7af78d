"""Groups of real Redis servers with fail-over: a cluster, and a master with replicas that sentinels watch."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from redis import Redis as Client
from redis.crc import key_slot
from redis.exceptions import RedisError

from tests.support.servers.ports import free_port
from tests.support.servers.redis_server import START_S, RedisServer

MASTER_NAME = "stack-master"


@dataclass
class RedisGroup:
    """Servers, and the fields of a run config's `kv_store` for them. `find_master` returns the one that holds a key."""

    fields: dict[str, object]
    servers: list[RedisServer]
    find_master: Callable[[str], RedisServer]


@contextmanager
def redis_cluster(
    folder: Path, *, masters: int = 3, replicas: int = 1, node_timeout_s: float = 1
) -> Generator[RedisGroup]:
    """Start a cluster of that many masters, each with that many replicas, one of which is promoted when its master was
    away for `node_timeout_s`."""
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for number in range(masters * (1 + replicas)):
            (folder / f"node{number}").mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", f"{node_timeout_s * 1000:.0f}")
            options += ("--cluster-port", str(free_port()))
            servers.append(stack.enter_context(RedisServer(folder / f"node{number}", *options)))
        hosts = [server.host for server in servers]
        if len(hosts) == 1:
            with _open(servers[0]) as client:
                _call(client, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        else:
            command = ("redis-cli", "--cluster", "create", *hosts, "--cluster-replicas", str(replicas), "--cluster-yes")
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        for server in servers:
            _wait_for(server, lambda client: b"cluster_state:ok" in _call(client, "CLUSTER", "INFO"))
            _wait_for(server, lambda client: not _is_master(client) or len(_call(client, "ROLE")[2]) == replicas)

        def find_master(key: str) -> RedisServer:
            for server in servers:
                with _open(server) as client:
                    if _is_master(client) and _has_slot(client, key_slot(key.encode())):
                        return server
            raise AssertionError("no node has the slot")

        fields: dict[str, object] = {"url": f"redis://{','.join(hosts)}/0", "cluster": True}
        yield RedisGroup(fields, servers, find_master)


@contextmanager
def redis_sentinels(folder: Path) -> Generator[RedisGroup]:
    """Start a master with two replicas, and three sentinels that promote one of these when it is gone."""
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for number in range(3):
            (folder / f"server{number}").mkdir()
            replica_of = ("--replicaof", *servers[0].host.split(":")) if servers else ()
            servers.append(stack.enter_context(RedisServer(folder / f"server{number}", *replica_of)))
        sentinels = [stack.enter_context(_sentinel(folder, number, servers[0])) for number in range(3)]

        def find_master(_: str) -> RedisServer:
            for server in servers:
                with _open(server) as client:
                    if _is_master(client):
                        return server
            raise AssertionError("there is no master")

        _wait_for(servers[0], lambda client: _call(client, "ROLE")[2:] != [] and len(_call(client, "ROLE")[2]) == 2)
        fields: dict[str, object] = {"url": f"redis://{','.join(sentinels)}/0", "sentinel": MASTER_NAME}
        yield RedisGroup(fields, servers, find_master)


@contextmanager
def _sentinel(folder: Path, number: int, master: RedisServer) -> Generator[str]:
    """Run one sentinel; yields its host and port."""
    port, config = free_port(), folder / f"sentinel{number}.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor {MASTER_NAME} {master.host.replace(':', ' ')} 2\n"
        f"sentinel down-after-milliseconds {MASTER_NAME} 500\nsentinel failover-timeout {MASTER_NAME} 3000\n"
    )
    program = shutil.which("redis-server")
    assert program is not None
    process = subprocess.Popen((program, str(config), "--sentinel"), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "a sentinel does not start"
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(5)


def _wait_for(server: RedisServer, condition: Callable[[Client], bool]) -> None:
    deadline = time.monotonic() + START_S
    with _open(server) as client:
        while True:
            try:
                if condition(client):
                    return
            except RedisError:
                pass
            assert time.monotonic() < deadline, f"{server.url} is not ready"
            time.sleep(0.05)


def _call(client: Client, *words: object) -> Any:
    return cast("Any", client.execute_command(*words))  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped


def _open(server: RedisServer) -> Client:
    return Client.from_url(server.url)  # pyright: ignore[reportUnknownMemberType] - as above


def _is_master(client: Client) -> bool:
    return _call(client, "ROLE")[0] == b"master"


def _has_slot(client: Client, slot: int) -> bool:
    own_id = _call(client, "CLUSTER", "MYID")
    return any(low <= slot <= high and node[2] == own_id for low, high, node, *_ in _call(client, "CLUSTER", "SLOTS"))
