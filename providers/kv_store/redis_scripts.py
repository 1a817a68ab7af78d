"""The layout of a `Redis` store, and the scripts that change and read it, each in one atomic step."""

# The layout in Redis, after the prefix: `version` grows with each write, by steps of random size, so that a promoted
# replica that misses the last writes repeats no version; `e:<key>` is eight bytes of version, big-endian, and
# then the value with its checksum, and expires by itself; `keys` is a sorted set of all keys with equal scores, which
# sorts them by their bytes; `expiry` is a sorted set of the keys that expire, by the moment, in milliseconds of Redis's
# own clock.
VERSION_BYTES = 8
MAX_VERSION_STEP = 256
"""Lua counts exactly up to 2 ** 53: 200 years of 10,000 writes a second."""
EXPECT_FAILED = -1
ANY_VERSION = b"-"
SWEEP_ROWS = 500

# KEYS: version, keys, expiry. ARGV: the entries' prefix, the step of the version, then of each op: put or delete, key,
# expected version's bytes ('' for ABSENT, '-' for any), ttl in ms or '', value. All refusals come before the first
# change: INCRBY is denied when memory is full, and after one change Redis lets a script finish.
WRITE_SCRIPT = """
local counts = false
for i = 3, #ARGV, 5 do
  if ARGV[i + 2] ~= '-' and redis.call('GETRANGE', ARGV[1] .. ARGV[i + 1], 0, 7) ~= ARGV[i + 2] then return -1 end
  counts = counts or ARGV[i] == 'put'
end
if #ARGV == 2 then return 0 end
local version = counts and redis.call('INCRBY', KEYS[1], ARGV[2]) or 0
local stamp = struct.pack('>I8', version)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 3, #ARGV, 5 do
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
