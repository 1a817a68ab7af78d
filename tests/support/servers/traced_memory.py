"""How many bytes Python holds that it has taken since a moment."""

import gc
import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager


class TracedMemory:
    """Bytes of the blocks that were taken since the context was opened."""

    def held_bytes(self) -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]


@contextmanager
def traced_memory() -> Generator[TracedMemory]:
    """Trace what is taken while the context is open."""
    gc.collect()
    tracemalloc.start()
    try:
        yield TracedMemory()
    finally:
        tracemalloc.stop()
