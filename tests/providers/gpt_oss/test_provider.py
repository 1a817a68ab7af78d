"""GptOss through the suite that every Inference is run through, and what it makes of sampling parameters."""

import asyncio
import io
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from apis.chat import ChatRequest, Message
from apis.errors import ConfigError, InvalidRequest
from apis.inference import DefaultSampling
from providers.inference.gpt_oss.checkpoint.checkpoint import Progress
from providers.inference.gpt_oss.checkpoint.loading import GIB, LoadingReport
from providers.inference.gpt_oss.provider import GptOss, read_default_sampling, request_to_sampling
from providers.inference.harmony.render import HarmonyOptions
from tests.conformance.inference import LAWS, Law, Subject
from tests.support.models import tiny_lessons as known
from tests.support.models.tiny_gpt_oss import MODEL, tiny_gpt_oss_folder

pytestmark = pytest.mark.timeout(400, func_only=True)

NEVER_ENDS = {"200002": -100.0, "200007": -100.0, "200012": -100.0}


def config(**fields: object) -> GptOss.Config:
    return GptOss.Config.model_validate({"path": Path("/nowhere/tiny"), **fields})


def request(**fields: object) -> ChatRequest:
    said = [Message(role="user", content=known.FRANCE)]
    return ChatRequest.model_validate({"model": MODEL, "messages": said, "temperature": 0, **fields})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tiny() -> AsyncGenerator[GptOss]:
    provider = GptOss(
        config(
            path=await asyncio.to_thread(tiny_gpt_oss_folder),
            model=MODEL,
            dtype="float32",
            threads=1,
            slots=8,
            context_tokens=2048,
            kv_memory_gib=0.1,
            harmony=HarmonyOptions.model_validate({"current_date": known.TODAY}),
        )
    )
    await provider.start()
    yield provider
    await provider.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_law(law: Law, tiny: GptOss) -> None:
    tool = {"type": "function", "function": known.WEATHER}
    rome = [Message(role="user", content=known.ROME)]
    await law(
        Subject(
            tiny,
            request(),
            long=request(temperature=2, logit_bias=NEVER_ENDS),
            call=request(messages=rome, tools=[tool]),
            unknown=request(model="other"),
        )
    )


def test_fields_that_a_request_omits_are_the_configs() -> None:
    sampling = request_to_sampling(request(temperature=None), DefaultSampling(0.5, 0.9))
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.logprobs) == (0, 0.0, None)
    assert (
        request_to_sampling(request(), DefaultSampling()).seed != request_to_sampling(request(), DefaultSampling()).seed
    )


@pytest.mark.parametrize(
    ("written", "fields", "expected"),
    [
        ({"temperature": 0.25, "top_p": 0.5}, {}, DefaultSampling(0.25, 0.5)),
        ({"temperature": 0.25, "top_p": 0.5}, {"temperature": 1.5}, DefaultSampling(1.5, 0.5)),
        ({"temperature": None, "eos_token_id": [1]}, {}, DefaultSampling(1.0, 1.0)),
        ({"do_sample": False, "temperature": 0.7}, {}, DefaultSampling(0.0, 1.0)),
        (None, {"top_p": 0.9}, DefaultSampling(1.0, 0.9)),
    ],
)
def test_defaults_are_those_of_the_checkpoints_authors(
    written: Any, fields: dict[str, Any], expected: DefaultSampling, tmp_path: Path
) -> None:
    """Unless the run config sets others."""
    if written is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert read_default_sampling(GptOss.Config(path=tmp_path, **fields)) == expected


def test_defaults_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """The server names them at its start."""
    (tmp_path / "generation_config.json").write_text('{"temperature": "warm"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        read_default_sampling(GptOss.Config(path=tmp_path))


def test_fields_of_a_request_are_taken() -> None:
    fields = {"top_p": 0.0, "top_k": 7, "seed": -1, "logprobs": True, "logit_bias": {"5": 2.5}}
    sampling = request_to_sampling(request(**fields), DefaultSampling())
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.0, 7, -1)
    assert sampling.logprobs == 0
    assert sampling.logit_bias == {5: 2.5}


@pytest.mark.parametrize("bias", [{"x": 1}, {"201088": 1}, {"-1": 1}, {"1": 101}, {"²": 1}])
def test_a_bias_of_no_token_is_refused(bias: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_to_sampling(request(logit_bias=bias), DefaultSampling())
    assert caught.value.param == "logit_bias"


async def test_a_folder_without_a_checkpoint_is_an_error_before_anything_is_served(tmp_path: Path) -> None:
    provider = GptOss(config(path=tmp_path / "none"))
    with pytest.raises(ConfigError, match="none"):
        await provider.start()
    await provider.close()


async def test_a_certified_head_is_for_kernels_alone(tmp_path: Path) -> None:
    provider = GptOss(config(path=tmp_path, backend="torch", certified_head=True))
    with pytest.raises(ConfigError, match="certified_head is for our own kernels"):
        await provider.start()
    await provider.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_is_reported_on_one_line_of_a_terminal_and_on_few_of_a_log() -> None:
    times = [0.0]
    outputs: dict[str, str] = {}
    for out in (Terminal(), io.StringIO()):
        times[0] = 0.0
        report = LoadingReport("gpt-oss-20b", out, lambda: times[0])
        for layer in range(25):
            times[0] = layer * 0.5
            report.show(Progress(layer, 24, layer * GIB // 2, 12 * GIB))
        report.finish("ready")
        outputs[type(out).__name__] = out.getvalue()
    assert outputs["Terminal"].count("\n") == 1
    assert "layer 12 of 24, 6.0 of 12.0 GiB, 6 s left" in outputs["Terminal"]
    assert outputs["StringIO"].splitlines() == [
        "gpt-oss-20b: layer 10 of 24, 5.0 of 12.0 GiB, 7 s left",
        "gpt-oss-20b: layer 20 of 24, 10.0 of 12.0 GiB, 2 s left",
        "gpt-oss-20b: ready, loaded in 12.0 s",
    ]
