"""How an index lies in Redis: the keys of a store, and the scripts that are all that touches them.

Of each store, whose keys have its name in their hash tag:
- `head`, a hash: `tick`, which counts changes; `stamp`, another one after each write; `generation`, the stamp of the
  store's first; `touched`, the tick of the last change that was more than a new row; `floor`, the tick from which on
  `gone` is complete; `bytes`, of all rows together.
- `rows`, a hash: what lies at a row never changes. A row's name is the tick at which it was made.
- `attributes` and `texts`, hashes by the row's name. Attributes are those that are set anew.
- `places`, a sorted set of file/number/row with equal scores, which sorts them by their bytes.
- `order`, a sorted set of the rows by the tick at which they were made or had their attributes set.
- `gone`, a sorted set of rows that are no more, by the tick at which they went; the latest so many of them.
- `stamps`, a sorted set of the latest so many stamps, by their ticks.
So who has seen all up to a tick asks for what `order` and `gone` have beyond it, and knows all again. Every tick marks
one row of `order` at most, and one of `gone`: a list can be cut at any of them. And who has seen a stamp that is not
among `stamps` has seen what Redis has lost: writes that no replica or file had when it failed.
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

PIECE: Final = 1000
"""Rows that one call of a script deletes or gives attributes."""
PAGE: Final = 500
"""Rows that one call of a script reads."""
GONE: Final = 10_000
"""Rows whose end is remembered. Who has not looked for longer reads the store anew."""
STAMPS: Final = 1000
"""Writes that are remembered; the same goes for them."""

# KEYS: all. ARGV begins with GONE, STAMPS and a new stamp.
_WRITING: Final = """
local bytes, touched = 0, false
local function forget(row, tick)
  bytes = bytes - redis.call('HSTRLEN', KEYS[5], row)
  for i = 5, 7 do redis.call('HDEL', KEYS[i], row) end
  redis.call('ZREM', KEYS[2], row)
  redis.call('ZADD', KEYS[3], tick, row)
  touched = true
end
local function finish(tick)
  redis.call('HSET', KEYS[1], 'stamp', ARGV[3])
  redis.call('HINCRBY', KEYS[1], 'bytes', bytes)
  if touched then redis.call('HSET', KEYS[1], 'touched', tick) end
  redis.call('ZADD', KEYS[8], tick, ARGV[3])
  redis.call('ZREMRANGEBYRANK', KEYS[8], 0, -1 - ARGV[2])
  local extra = redis.call('ZCARD', KEYS[3]) - ARGV[1]
  if extra > 0 then
    local last = redis.call('ZRANGE', KEYS[3], extra - 1, extra - 1, 'WITHSCORES')
    redis.call('HSET', KEYS[1], 'floor', last[2])
    redis.call('ZREMRANGEBYRANK', KEYS[3], 0, extra - 1)
  end
end
"""

# Then of each chunk: place, row, attributes, text. What can be refused is refused before the first change: HINCRBY is
# denied when memory is out, and after one change Redis lets a script finish.
UPSERT: Final = (
    _WRITING
    + """
local tick = redis.call('HINCRBY', KEYS[1], 'tick', (#ARGV - 3) / 4) - (#ARGV - 3) / 4
redis.call('HSETNX', KEYS[1], 'generation', ARGV[3])
for i = 4, #ARGV, 4 do
  tick = tick + 1
  local row = string.format('%d', tick)
  for _, place in ipairs(redis.call('ZRANGEBYLEX', KEYS[4], '[' .. ARGV[i] .. '/', '(' .. ARGV[i] .. '0')) do
    redis.call('ZREM', KEYS[4], place)
    forget(string.match(place, '%d+$'), row)
  end
  redis.call('ZADD', KEYS[4], 0, ARGV[i] .. '/' .. row)
  redis.call('ZADD', KEYS[2], row, row)
  redis.call('HSET', KEYS[5], row, ARGV[i + 1])
  redis.call('HSET', KEYS[6], row, ARGV[i + 2])
  redis.call('HSET', KEYS[7], row, ARGV[i + 3])
  bytes = bytes + #ARGV[i + 1]
end
finish(string.format('%d', tick))
"""
)

# Then the file, and how many at most. Returns how many were deleted. What frees memory comes first, for then Redis lets
# a script finish even when memory is out.
DELETE: Final = (
    _WRITING
    + """
local places = redis.call('ZRANGEBYLEX', KEYS[4], '[' .. ARGV[4] .. '/', '(' .. ARGV[4] .. '0', 'LIMIT', 0, ARGV[5])
if #places == 0 then return 0 end
for _, place in ipairs(places) do redis.call('ZREM', KEYS[4], place) end
local last = redis.call('HINCRBY', KEYS[1], 'tick', #places)
for i, place in ipairs(places) do
  forget(string.match(place, '%d+$'), string.format('%d', last - #places + i))
end
finish(string.format('%d', last))
return #places
"""
)

# Then the file, after which place, how many at most, and the attributes. Returns the last place that was given them, or
# nothing when there are no more.
SET_ATTRIBUTES: Final = (
    _WRITING
    + """
local low = ARGV[5] == '' and '[' .. ARGV[4] .. '/' or '(' .. ARGV[5]
local places = redis.call('ZRANGEBYLEX', KEYS[4], low, '(' .. ARGV[4] .. '0', 'LIMIT', 0, ARGV[6])
if #places == 0 then return false end
local last = redis.call('HINCRBY', KEYS[1], 'tick', #places)
for i, place in ipairs(places) do
  local row = string.match(place, '%d+$')
  redis.call('ZADD', KEYS[2], string.format('%d', last - #places + i), row)
  redis.call('HSET', KEYS[6], row, ARGV[7])
end
touched = true
finish(string.format('%d', last))
return #places == tonumber(ARGV[6]) and places[#places]
"""
)

# KEYS: head, texts. ARGV: rows. Returns the head's fields and the rows' texts.
LOOK: Final = """
local texts = {}
for i, row in ipairs(ARGV) do texts[i] = redis.call('HGET', KEYS[2], row) end
return {redis.call('HMGET', KEYS[1], 'generation', 'stamp', 'tick', 'touched', 'bytes'), texts}
"""

# KEYS: all. ARGV: the generation, the stamp and the tick up to which all is known, after and until which tick of
# `order`, after which tick of `gone`, how many at most. Returns the stamp, the tick, the rows' names, the last of their
# ticks, those rows that are not known, the attributes of all, the names of those gone and the last of their ticks; or
# nothing where the store is another one or does not remember as much. Short things come as one text, for the client
# takes longest for each by itself; joining long ones takes longest here.
READ: Final = """
local head = redis.call('HMGET', KEYS[1], 'generation', 'floor', 'stamp', 'tick')
if head[1] ~= ARGV[1] or tonumber(ARGV[6]) < tonumber(head[2] or 0) then return false end
if ARGV[2] ~= '' and not redis.call('ZSCORE', KEYS[8], ARGV[2]) then return false end
local found = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[4], ARGV[5], 'WITHSCORES', 'LIMIT', 0, ARGV[7])
local gone = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[6], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[7])
local names, rows, attributes, ended = {}, {}, {}, {}
for i = 1, #found, 2 do
  names[#names + 1] = found[i]
  if tonumber(found[i]) > tonumber(ARGV[3]) then rows[#rows + 1] = redis.call('HGET', KEYS[5], found[i]) end
  attributes[#attributes + 1] = redis.call('HGET', KEYS[6], found[i])
end
for i = 1, #gone, 2 do ended[#ended + 1] = gone[i] end
return {
  head[3], head[4], table.concat(names, ','), found[#found] or ARGV[4], rows, table.concat(attributes, '\\n'),
  table.concat(ended, ','), gone[#gone] or ARGV[6],
}
"""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a store's keys."""

    head: str
    order: str
    gone: str
    places: str
    rows: str
    attributes: str
    texts: str
    stamps: str

    @property
    def all(self) -> tuple[str, ...]:
        """In the order that the scripts know them by."""
        return self.head, self.order, self.gone, self.places, self.rows, self.attributes, self.texts, self.stamps


def store_to_keys(prefix: str, store: str) -> Keys:
    # Not empty, and without braces, which a hash tag would end at.
    tag = f"{prefix}{{store:{quote(store, safe='/')}}}:"
    return Keys(*(tag + name for name in ("head", "order", "gone", "places", "rows", "attributes", "texts", "stamps")))


def file_to_place(file: str) -> str:
    """How the places of a file begin. A number and a row follow, each after a slash, which it has none of itself."""
    return quote(file, safe="")
