"""A receiver of OTLP that the stacks of a test send to."""

from collections.abc import Generator

import pytest

from tests.support.servers.otlp_receiver import OtlpReceiver, otlp_variables, receiving_otlp


@pytest.fixture
def otlp(monkeypatch: pytest.MonkeyPatch) -> Generator[OtlpReceiver]:
    """A running receiver, which the environment names."""
    with receiving_otlp() as receiver:
        for name, value in otlp_variables(receiver).items():
            monkeypatch.setenv(name, value)
        yield receiver
