"""Kernels on the CPU run in Triton's interpreter, which is slow."""

from collections.abc import Generator

import pytest

from tests.providers.gpt_oss.triton_interpreter import patch_language_once


@pytest.fixture(scope="session", autouse=True)
def interpreter_patches_once() -> Generator[None]:
    """Spare Triton's interpreter what it repeats at each call of a function."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch_language_once(monkeypatch)
        yield
