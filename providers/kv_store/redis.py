"""Redis: a KVStore for several machines. Waiting calls are sent as one pipeline, on one connection."""

import asyncio
import logging
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

from pydantic import Field, SecretStr
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError

from apis.errors import ConfigError, StoreUnavailable
from apis.storage.kv_store import ABSENT, MEASURE_ROWS, Entry, KVStore, Op, Put
from providers.kv_store.batcher import Batcher, BatchTasks
from providers.kv_store.checks import build_quota, encode_key, encode_ops, scan_range
from providers.kv_store.checksum import EntryDecoder, add_checksum
from providers.kv_store.redis_master import MOVED_ERRORS, RedisMaster
from providers.kv_store.redis_scripts import (
    ANY_VERSION,
    EXPECT_FAILED,
    MAX_VERSION_STEP,
    MEASURE_SCRIPT,
    SCAN_SCRIPT,
    SWEEP_ROWS,
    SWEEP_SCRIPT,
    VERSION_BYTES,
    WRITE_SCRIPT,
)

log = logging.getLogger(__name__)

Command = tuple[str | bytes | int, ...]


class Redis(KVStore):
    """A store in one Redis server of version 6.2 or later, as durable as its own persistence setting.

    Redis must not evict (`maxmemory-policy noeviction`, its default): eviction would break the promises of the store.
    Its changes are atomic over all keys, which a cluster offers within one slot only: there the whole store is in one
    slot, so a cluster brings fail-over, and no more room or speed than one of its nodes has.
    """

    spans_machines = True

    class Config(KVStore.Config):
        """`url` is redis://, rediss:// or unix://, and may hold a password; all keys begin with `prefix`.

        With `sentinel`, the name of a master, the hosts of the url (`@a:26379,b:26379/`) are sentinels, which need no
        password; with `cluster`, they are nodes of a cluster. A durable write returns when `min_replicas` replicas have
        it, and fails where they do not in time: what was acknowledged then outlives the promotion of one of them.

        A call fails `timeout_s` + `connect_timeout_s` after it began.
        """

        url: SecretStr
        prefix: str = "stack:"
        sentinel: str = ""
        cluster: bool = False
        min_replicas: int = Field(default=0, ge=0, le=16)
        timeout_s: float = Field(default=1.0, gt=0, le=60)
        connect_timeout_s: float = Field(default=0.5, gt=0, le=60)

    def __init__(self, config: Config) -> None:
        self._config = config
        self.quota = build_quota(self, config.max_tenant_bytes)
        self._deadline_s = config.timeout_s + config.connect_timeout_s
        self._batcher: Batcher[Command, Any] = Batcher(BatchTasks(self._run_pipeline), timeout_s=self._deadline_s)
        self._is_open = False
        self._decoder = EntryDecoder()
        prefix = config.prefix.encode()
        if config.cluster and not _has_hash_tag(prefix):
            prefix = b"{%b}" % prefix  # the hash tag that keeps the store in one slot
        self._master = RedisMaster(
            config.url.get_secret_value(),
            prefix,
            cluster=config.cluster,
            sentinel=config.sentinel,
            options={"socket_timeout": config.timeout_s, "socket_connect_timeout": config.connect_timeout_s},
        )
        self._entry_prefix, self._version_key, self._key_index, self._expiry_index = (
            prefix + name for name in (b"e:", b"version", b"keys", b"expiry")
        )

    async def start(self) -> None:
        self._is_open = True
        try:
            async with asyncio.timeout(self._deadline_s):
                await (await self._master.connect()).ping()  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped
        except (AuthenticationError, AuthorizationError, ResponseError) as exc:
            await self.close()
            raise ConfigError(f"Redis refuses the url's user, password or database: {type(exc).__name__}.") from exc
        except (RedisError, OSError, TimeoutError) as exc:
            log.warning("Redis cannot be reached yet (%s); calls fail until it can.", type(exc).__name__)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self.quota is not None:
            await self.quota.close()
        await self._batcher.drain()
        self._is_open = False
        await self._master.forget()

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        names = [self._entry_prefix + encode_key(key) for key in keys]
        if not names:
            return []
        stored = await self._batcher.submit(("MGET", *names))
        return [
            None if value is None else self._stored_to_entry(key.encode(), value)
            for key, value in zip(keys, stored, strict=True)
        ]

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        cells = [cell for key, op in encode_ops(ops).items() for cell in _op_to_cells(key, op)]
        keys = self._version_key, self._key_index, self._expiry_index
        step = random.randint(1, MAX_VERSION_STEP)  # noqa: S311 - not a secret
        command: Command = ("EVAL", WRITE_SCRIPT, len(keys), *keys, self._entry_prefix, step, *cells)
        version = await self._batcher.submit(_Durable(command) if durable and self._config.min_replicas else command)
        if version == EXPECT_FAILED:
            return None
        self.count_write(ops)
        return [version if isinstance(op, Put) else ABSENT for op in ops]

    async def scan(
        self,
        prefix: str,
        *,
        after: str = "",
        before: str = "",
        limit: int = 1000,
        reverse: bool = False,
        max_bytes: int | None = None,
    ) -> list[tuple[str, Entry]]:
        low, high = scan_range(prefix, after, before, limit)
        options = "reverse" if reverse else "", "" if max_bytes is None else max_bytes
        cells = await self._batcher.submit(
            (
                "EVAL",
                SCAN_SCRIPT,
                1,
                self._key_index,
                self._entry_prefix,
                low,
                high,
                limit,
                *options,
            )
        )
        rows = zip(cells[::2], cells[1::2], strict=True)
        return [(key.decode(), self._stored_to_entry(key, stored)) for key, stored in rows]

    async def measure(self, prefix: str, *, after: str = "") -> tuple[int, str]:
        low, high = scan_range(prefix, after, "", MEASURE_ROWS)
        size, last_key = await self._batcher.submit(
            ("EVAL", MEASURE_SCRIPT, 1, self._key_index, self._entry_prefix, low, high, MEASURE_ROWS)
        )
        return size, last_key.decode()

    async def sweep(self) -> int:
        swept = 0
        command: Command = (
            "EVAL",
            SWEEP_SCRIPT,
            2,
            self._key_index,
            self._expiry_index,
            self._entry_prefix,
            SWEEP_ROWS,
        )
        while (count := await self._batcher.submit(command)) == SWEEP_ROWS:
            swept += count
        return swept + count

    def _stored_to_entry(self, key: bytes, stored: bytes) -> Entry:
        return self._decoder.decode(key, stored[VERSION_BYTES:], int.from_bytes(stored[:VERSION_BYTES], "big"))

    async def _run_pipeline(self, commands: Sequence[Command]) -> list[Any]:
        if not self._is_open:
            raise StoreUnavailable("The store is closed.")
        min_replicas = self._config.min_replicas if any(isinstance(command, _Durable) for command in commands) else 0
        try:
            async with asyncio.timeout(self._deadline_s):
                client = await self._master.connect()
                async with client.pipeline(transaction=False) as pipeline:
                    for command in commands:
                        pipeline.execute_command(*command)  # pyright: ignore[reportUnknownMemberType] - as above
                    if min_replicas:
                        pipeline.execute_command("WAIT", min_replicas, round(self._config.timeout_s * 500))  # pyright: ignore[reportUnknownMemberType] - as above
                    answers = await pipeline.execute(raise_on_error=False)
        except ConfigError as exc:
            raise StoreUnavailable(str(exc)) from exc
        except (RedisError, OSError, TimeoutError) as exc:
            await self._master.forget()
            raise StoreUnavailable(f"Redis cannot be reached ({type(exc).__name__}).") from exc
        if any(_says_moved(answer) for answer in answers):
            await self._master.forget()
        results = [_answer_to_unavailable(answer) if isinstance(answer, Exception) else answer for answer in answers]
        if not min_replicas:
            return results
        replicas = results.pop()
        return [_require_replicas(*pair, replicas, min_replicas) for pair in zip(commands, results, strict=True)]


def _says_moved(answer: Any) -> bool:
    """Return True for an error that says that the store is on another server now. A script of Redis 6 quotes it."""
    return isinstance(answer, MOVED_ERRORS) or (isinstance(answer, Exception) and "READONLY" in str(answer)[:200])


class _Durable(tuple[str | bytes | int, ...]):
    """A command whose change replicas must have before it is acknowledged."""

    __slots__ = ()


def _require_replicas(command: Command, result: Any, replicas: Any, min_replicas: int) -> Any:
    """Return the result, or the error of a durable change that too few replicas have."""
    if not isinstance(command, _Durable) or result == EXPECT_FAILED or isinstance(result, Exception):
        return result
    if isinstance(replicas, int) and replicas >= min_replicas:
        return result
    return StoreUnavailable(f"Fewer than {min_replicas} replicas of Redis have the change (`min_replicas`).")


def _op_to_cells(key: bytes, op: Op) -> Command:
    expect = ANY_VERSION if op.expect is None else b"" if op.expect == ABSENT else struct.pack(">q", op.expect)
    if not isinstance(op, Put):
        return "delete", key, expect, b"", b""
    return "put", key, expect, b"" if op.ttl_s is None else math.ceil(op.ttl_s * 1000), add_checksum(key, op.value)


def _answer_to_unavailable(answer: Exception) -> StoreUnavailable:
    """Return the refusal with only Redis's code (MISCONF, OutOfMemoryError, ...): its message may quote the command."""
    code = str(answer).split(" ", 1)[0]
    error = StoreUnavailable(f"Redis cannot do that now: {code if code.isupper() else type(answer).__name__}.")
    error.__cause__ = answer
    return error


def _has_hash_tag(prefix: bytes) -> bool:
    """Return true if the part between the first braces decides the slot of all keys with this prefix."""
    tag, closing_brace, _ = prefix.partition(b"{")[2].partition(b"}")
    return bool(tag and closing_brace)
