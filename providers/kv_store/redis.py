"""Redis: a KVStore for several machines. Waiting calls are sent as one pipeline, on one connection."""

import asyncio
import logging
import math
import struct
from collections.abc import Sequence
from typing import Any

from pydantic import Field, SecretStr
from redis.asyncio import ConnectionPool
from redis.asyncio import Redis as Client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from apis.errors import ConfigError, StoreUnavailable
from apis.storage.kv_store import ABSENT, MEASURE_ROWS, Entry, KVStore, Op, Put
from providers.kv_store.batcher import Batcher
from providers.kv_store.checks import build_quota, encode_key, encode_ops, scan_range
from providers.kv_store.checksum import add_checksum, stored_to_entry

log = logging.getLogger(__name__)

# The layout in Redis, after the prefix: `version` counts writes; `e:<key>` is eight bytes of version, big-endian, and
# then the value with its checksum, and expires by itself; `keys` is a sorted set of all keys with equal scores, which
# sorts them by their bytes; `expiry` is a sorted set of the keys that expire, by the moment, in milliseconds of Redis's
# own clock.
VERSION_BYTES = 8
EXPECT_FAILED = -1
ANY_VERSION = b"-"
SWEEP_ROWS = 500

# KEYS: version, keys, expiry. ARGV: the entries' prefix, then of each op: put or delete, key, expected version's bytes
# ('' for ABSENT, '-' for any), ttl in ms or '', value. All refusals come before the first change: INCR is denied when
# memory is full, and after one change Redis lets a script finish.
WRITE_SCRIPT = """
local counts = false
for i = 2, #ARGV, 5 do
  if ARGV[i + 2] ~= '-' and redis.call('GETRANGE', ARGV[1] .. ARGV[i + 1], 0, 7) ~= ARGV[i + 2] then return -1 end
  counts = counts or ARGV[i] == 'put'
end
if #ARGV == 1 then return 0 end
local version = counts and redis.call('INCR', KEYS[1]) or 0
local stamp = struct.pack('>I8', version)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 2, #ARGV, 5 do
  local key, name, ttl = ARGV[i + 1], ARGV[1] .. ARGV[i + 1], ARGV[i + 3]
  if ARGV[i] == 'delete' then
    redis.call('DEL', name)
    redis.call('ZREM', KEYS[2], key)
    redis.call('ZREM', KEYS[3], key)
  else
    redis.call('ZADD', KEYS[2], 0, key)
    if ttl == '' then
      redis.call('SET', name, stamp .. ARGV[i + 4])
      redis.call('ZREM', KEYS[3], key)
    else
      local gone = string.format('%d', now + ttl)
      redis.call('SET', name, stamp .. ARGV[i + 4], 'PXAT', gone)
      redis.call('ZADD', KEYS[3], gone, key)
    end
  end
end
return version
"""

# KEYS: keys. ARGV: the entries' prefix, low, high, limit, 'reverse' or '', bytes of values or ''. Returns keys and
# stored values alternating. MGET reads 500 values at once, so it is used only where their size has no bound.
SCAN_SCRIPT = """
local rows, low, high, remaining = {}, '[' .. ARGV[2], '(' .. ARGV[3], tonumber(ARGV[4])
local room = tonumber(ARGV[6])
while remaining > 0 do
  local step = math.min(remaining, 500)
  local keys
  if ARGV[5] == 'reverse' then
    keys = redis.call('ZREVRANGEBYLEX', KEYS[1], high, low, 'LIMIT', 0, step)
    high = '(' .. (keys[#keys] or '')
  else
    keys = redis.call('ZRANGEBYLEX', KEYS[1], low, high, 'LIMIT', 0, step)
    low = '(' .. (keys[#keys] or '')
  end
  if #keys == 0 then break end
  local names = {}
  for i, key in ipairs(keys) do names[i] = ARGV[1] .. key end
  if room then
    for i, key in ipairs(keys) do
      local stored = redis.call('GET', names[i])
      if stored then
        rows[#rows + 1] = key
        rows[#rows + 1] = stored
        remaining = remaining - 1
        room = room - #stored + 8
        if room < 0 then return rows end
      end
    end
  else
    for i, stored in ipairs(redis.call('MGET', unpack(names))) do
      if stored then
        rows[#rows + 1] = keys[i]
        rows[#rows + 1] = stored
        remaining = remaining - 1
      end
    end
  end
end
return rows
"""

# KEYS: keys. ARGV: the entries' prefix, low, high, limit. Returns the bytes of the entries and the last key, or ''.
MEASURE_SCRIPT = """
local size, last, remaining, low = 0, '', tonumber(ARGV[4]), '[' .. ARGV[2]
while remaining > 0 do
  local keys = redis.call('ZRANGEBYLEX', KEYS[1], low, '(' .. ARGV[3], 'LIMIT', 0, math.min(remaining, 500))
  if #keys == 0 then break end
  for _, key in ipairs(keys) do size = size + #key + redis.call('STRLEN', ARGV[1] .. key) end
  remaining, last = remaining - #keys, keys[#keys]
  low = '(' .. last
end
return {size, last}
"""

# KEYS: keys, expiry. ARGV: the entries' prefix, the limit. Returns the number of expired entries.
SWEEP_SCRIPT = """
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local keys = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. now, 'LIMIT', 0, ARGV[2])
for _, key in ipairs(keys) do
  redis.call('DEL', ARGV[1] .. key)
  redis.call('ZREM', KEYS[1], key)
  redis.call('ZREM', KEYS[2], key)
end
return #keys
"""

Command = tuple[str | bytes | int, ...]


class Redis(KVStore):
    """A store in one Redis server of version 6.2 or later, not a cluster, as durable as its own persistence setting.

    Redis must not evict (`maxmemory-policy noeviction`, its default): eviction would break the promises of the store.
    """

    spans_machines = True

    class Config(KVStore.Config):
        """`url` is redis://, rediss:// or unix://, and may hold a password; all keys begin with `prefix`.

        A call fails `timeout_s` + `connect_timeout_s` after it began.
        """

        url: SecretStr
        prefix: str = "stack:"
        timeout_s: float = Field(default=1.0, gt=0, le=60)
        connect_timeout_s: float = Field(default=0.5, gt=0, le=60)

    def __init__(self, config: Config) -> None:
        self._config = config
        self.quota = build_quota(self, config.max_tenant_bytes)
        self._deadline_s = config.timeout_s + config.connect_timeout_s
        self._batcher: Batcher[Command, Any] = Batcher(self._run_pipeline, timeout_s=self._deadline_s)
        self._client: Client | None = None
        prefix = config.prefix.encode()
        self._entry_prefix, self._version_key, self._key_index, self._expiry_index = (
            prefix + name for name in (b"e:", b"version", b"keys", b"expiry")
        )

    async def start(self) -> None:
        try:
            pool = ConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped
                self._config.url.get_secret_value(),
                socket_timeout=self._config.timeout_s,
                socket_connect_timeout=self._config.connect_timeout_s,
                health_check_interval=15,
                retry=Retry(NoBackoff(), 0),
                # if enabled, redis-py does not replace a connection that the server has closed or that has an unread
                # answer, and ignores the time-outs above
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
            )
        except ValueError as exc:
            raise ConfigError("The Redis url must be redis://, rediss:// or unix://, with a host and a port.") from exc
        self._client = Client(connection_pool=pool)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._client.ping()  # pyright: ignore[reportUnknownMemberType] - as above
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
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
            await client.connection_pool.disconnect()

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        names = [self._entry_prefix + encode_key(key) for key in keys]
        if not names:
            return []
        stored = await self._batcher.submit(("MGET", *names))
        return [
            None if value is None else _stored_to_entry(key.encode(), value)
            for key, value in zip(keys, stored, strict=True)
        ]

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        cells = [cell for key, op in encode_ops(ops).items() for cell in _op_to_cells(key, op)]
        keys = self._version_key, self._key_index, self._expiry_index
        version = await self._batcher.submit(("EVAL", WRITE_SCRIPT, len(keys), *keys, self._entry_prefix, *cells))
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
        return [(key.decode(), _stored_to_entry(key, stored)) for key, stored in rows]

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

    async def _run_pipeline(self, commands: Sequence[Command]) -> list[Any]:
        if self._client is None:
            raise StoreUnavailable("The store is closed.")
        try:
            async with asyncio.timeout(self._deadline_s), self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)  # pyright: ignore[reportUnknownMemberType] - as above
                answers = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError, TimeoutError) as exc:
            raise StoreUnavailable(f"Redis cannot be reached ({type(exc).__name__}).") from exc
        return [_answer_to_unavailable(answer) if isinstance(answer, Exception) else answer for answer in answers]


def _op_to_cells(key: bytes, op: Op) -> Command:
    expect = ANY_VERSION if op.expect is None else b"" if op.expect == ABSENT else struct.pack(">q", op.expect)
    if not isinstance(op, Put):
        return "delete", key, expect, b"", b""
    return "put", key, expect, b"" if op.ttl_s is None else math.ceil(op.ttl_s * 1000), add_checksum(key, op.value)


def _stored_to_entry(key: bytes, stored: bytes) -> Entry:
    return stored_to_entry(key, stored[VERSION_BYTES:], int.from_bytes(stored[:VERSION_BYTES], "big"))


def _answer_to_unavailable(answer: Exception) -> StoreUnavailable:
    """Return the refusal with only Redis's code (MISCONF, OutOfMemoryError, ...): its message may quote the command."""
    code = str(answer).split(" ", 1)[0]
    error = StoreUnavailable(f"Redis cannot do that now: {code if code.isupper() else type(answer).__name__}.")
    error.__cause__ = answer
    return error
