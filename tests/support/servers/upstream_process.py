"""The inference server of the benchmarks, `tests/bench/upstream.py`, in a process of its own."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

PROGRAM: Final = Path(__file__).parents[2] / "bench" / "upstream.py"


@asynccontextmanager
async def running_upstream(port: int) -> AsyncGenerator[None]:
    """Run the server on this port. It may not listen yet when the context begins."""
    process = await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), str(port))
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
