"""GptOss: a provider that runs gpt-oss on this machine, on the stack's own engine, with Harmony rendered and parsed in
tokens."""

import asyncio
import json
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from pydantic import Field, TypeAdapter

from apis.chat import ChatRequest, refuse_engine_options, share_of_salt
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta, DeltaBatch, TokenLogprob, Usage
from apis.errors import ConfigError, ModelNotFound
from apis.inference import ALL_CONSTRAINTS, DefaultSampling, Inference, Model
from apis.provider import Provider, UserPath
from apis.sink import ConvertedSink, Sink
from apis.wire.base import Effort
from providers.inference.decisions.labels import FEW_LABELS, Label, require_labels
from providers.inference.decisions.prompts import refuse_images
from providers.inference.decisions.rows import DecisionRow, LabelScores, decide_by_labels, logprobs_to_scores
from providers.inference.gpt_oss.backend import LoadedRunner, load_backend
from providers.inference.gpt_oss.checkpoint.loading import GIB, LoadingReport
from providers.inference.gpt_oss.engine.engine import Engine, EngineMetrics, EngineRequest, EngineSettings, EngineStep
from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken
from providers.inference.gpt_oss.settings import Backend, BackendSettings
from providers.inference.gpt_oss.torch_backend.runner import DtypeName, TorchSettings
from providers.inference.harmony.harmony import Harmony
from providers.inference.harmony.logit_bias import parse_logit_bias
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.harmony.vocabulary import NATIVE_TOOLS, STOP_IDS

GENERATION_CONFIG: Final = "generation_config.json"
"""File of the authors' defaults for generation, in Hugging Face's layout."""
_SAMPLING_ADAPTER: Final = TypeAdapter(DefaultSampling)


class GptOss(Inference):
    """gpt-oss-20b, -120b, their fine-tunes, and any other model of that architecture and vocabulary."""

    class Config(Provider.Config):
        """`path` is a checkpoint's folder, in OpenAI's layout or Hugging Face's, served under `model` or the folder's
        name. `backend` triton is kernels for NVIDIA GPUs from Ampere on, torch runs everywhere, and auto takes the
        kernels where they can run; the kernels are opt-in until they have been measured on a card. `certified_head`
        makes them sample up to 8 streams from half the bytes, the same tokens, for 0.6 GB more memory. `slots`
        sequences run at once and the rest wait. `kv_memory_gib` and `context_tokens` are sized by the free memory
        unless they are set. `step_tokens` bounds one step's work: lower makes streams smoother while long prompts come
        in. `temperature` and `top_p` are the defaults of requests without them; where they are not set, those of the
        folder's generation_config.json, else 1."""

        path: UserPath
        model: str | None = Field(default=None, min_length=1, max_length=256)
        backend: Backend = "torch"
        certified_head: bool = False
        device: str = "auto"
        dtype: DtypeName = "bfloat16"
        threads: int | None = Field(default=None, ge=1, le=1024)
        slots: int = Field(default=32, ge=1, le=1024)
        context_tokens: int | None = Field(default=None, ge=256)
        kv_memory_gib: float | None = Field(default=None, gt=0)
        step_tokens: int = Field(default=2048, ge=64)
        max_waiting: int = Field(default=512, ge=0)
        temperature: float | None = Field(default=None, ge=0, le=2)
        top_p: float | None = Field(default=None, gt=0, le=1)
        run_anyway: bool = False
        harmony: HarmonyOptions = HarmonyOptions()

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine: Engine | None = None
        self._harmony: Harmony | None = None
        self._default_sampling = DefaultSampling()
        self._model = Model(
            id=config.model or config.path.name,
            owned_by="gpt_oss",
            modalities=frozenset(),
            native_tools=NATIVE_TOOLS,
            enforces=ALL_CONSTRAINTS,
            caches_prefixes=True,
        )

    async def start(self) -> None:
        """Load the checkpoint, with progress on stderr. Raises ConfigError for one that is damaged or does not fit."""
        config = self._config
        self._default_sampling = await asyncio.to_thread(read_default_sampling, config)
        self._harmony = harmony = await Harmony.load(config.harmony)
        runner, _ = await asyncio.gather(asyncio.to_thread(self._load), harmony.prepare_grammar_compiler())
        self._model = replace(self._model, context_tokens=runner.context_tokens)
        self._engine = Engine(runner, EngineSettings(step_tokens=config.step_tokens, max_waiting=config.max_waiting))
        await self._engine.start()

    async def close(self) -> None:
        """End every running stream, then the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def models(self) -> Sequence[Model]:
        """Return the one model."""
        return [self._model]

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        """See `Inference.stream`. A grammar enforces `tool_choice`, `strict` functions and the text format during
        generation."""
        engine, harmony = self._require_started(request.model)
        refuse_engine_options(request)
        sampling = request_to_sampling(request, self._default_sampling)
        prompt = await harmony.render_prompt(request)
        tenant = share_of_salt(request.cache_salt)
        matcher = None if prompt.grammar is None else await harmony.build_matcher(prompt.grammar, tenant)
        engine_request = EngineRequest(
            ids=prompt.token_ids,
            sampling=sampling,
            max_tokens=request.max_completion_tokens,
            stop_ids=(*STOP_IDS, *(request.stop_token_ids or ())),
            matcher=matcher,
            tenant=tenant,
            priority=request.priority or 0,
            salt=request.cache_salt,
        )
        reader = harmony.build_reader(request)

        def read(steps: Sequence[EngineStep]) -> DeltaBatch:
            deltas: list[Delta] = []
            for step in steps:
                deltas += reader.feed(step.ids, _render_token_logprobs(harmony, step.logprobs))
                end = "stop" if reader.is_stopped else step.finish_reason
                if end is not None:
                    deltas += reader.finish(end, input_tokens=len(prompt.token_ids), cached_tokens=step.cached_tokens)
                if reader.is_stopped and step.finish_reason is None:
                    raise _StoppedEarlyError(deltas)
            return deltas

        try:
            await engine.stream(engine_request, ConvertedSink(sink, read))
        except _StoppedEarlyError as stopped:
            await sink.put(stopped.deltas)

    async def decide(self, request: DecisionRequest) -> Decisions:
        """See `Inference.decide`. The text of the final answer begins at once: the model does not reason. As many rows
        run at once as there are slots."""
        engine, harmony = self._require_started(request.model)
        labels = harmony.labels
        refuse_images(request)
        require_labels(len(labels), request.questions, FEW_LABELS)

        async def read(row: DecisionRow) -> LabelScores:
            ids = await harmony.render_decision(request.model, row.messages)
            engine_request = EngineRequest(
                ids=ids,
                sampling=build_label_sampling(labels[: row.label_count]),
                max_tokens=1,
                tenant=share_of_salt(request.cache_salt),
                salt=request.cache_salt,
            )
            async with aclosing(engine.submit(engine_request)) as steps:
                step = await anext(steps)
            scores = step.logprobs[0].scores
            return logprobs_to_scores(labels[: row.label_count], scores, Usage(len(ids), 1, step.cached_tokens))

        texts = [label.text for label in labels]
        return await decide_by_labels(request, texts, read, parallel=self._config.slots, is_joined=False)

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return the effort of the system message."""
        return self._config.harmony.used_effort(request.reasoning_effort)

    async def default_sampling(self, model: str) -> DefaultSampling | None:
        """Return the sampling of the run config, or of the checkpoint's authors."""
        return self._default_sampling

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of the prompt that `chat` would send to the model."""
        _, harmony = self._require_started(request.model)
        return len((await harmony.render_prompt(request)).token_ids)

    def metrics(self) -> EngineMetrics:
        """Return the engine's figures. Raises RuntimeError before `start` and after `close`."""
        if self._engine is None:
            raise RuntimeError("GptOss is used before start or after close")
        return self._engine.metrics()

    def _require_started(self, model: str) -> tuple[Engine, Harmony]:
        if self._engine is None or self._harmony is None:
            raise RuntimeError("GptOss is used before start or after close")
        if model != self._model.id:
            raise ModelNotFound(model, [self._model.id])
        return self._engine, self._harmony

    def _load(self) -> LoadedRunner:
        config = self._config
        report = LoadingReport(self._model.id)
        settings = TorchSettings(
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            slots=config.slots,
            context_tokens=config.context_tokens,
            kv_memory_gib=config.kv_memory_gib,
            run_anyway=config.run_anyway,
        )
        backend = BackendSettings(config.backend, config.step_tokens, config.certified_head, settings)
        runner = load_backend(config.path, backend, report.show)
        report.finish(_summary(runner))
        return runner


class _StoppedEarlyError(Exception):
    """The answer has ended before the engine: at a text of `stop`. `deltas` are the last ones."""

    def __init__(self, deltas: DeltaBatch) -> None:
        super().__init__()
        self.deltas = deltas


def read_default_sampling(config: GptOss.Config) -> DefaultSampling:
    """Return the sampling of requests without their own. Raises ConfigError for a generation_config.json that cannot be
    read."""
    file = config.path.expanduser() / GENERATION_CONFIG
    defaults: dict[str, Any] = {}
    if file.is_file():
        try:
            defaults = json.loads(file.read_bytes())
            sampling = _SAMPLING_ADAPTER.validate_python(
                {name: defaults[name] for name in ("temperature", "top_p") if defaults.get(name) is not None}
            )
        except (OSError, ValueError, AttributeError) as exc:
            raise ConfigError(f"{file} cannot be read: {exc}") from exc
    else:
        sampling = DefaultSampling()
    if defaults.get("do_sample") is False:
        sampling = DefaultSampling(temperature=0.0)
    return DefaultSampling(
        sampling.temperature if config.temperature is None else config.temperature,
        sampling.top_p if config.top_p is None else config.top_p,
    )


def request_to_sampling(request: ChatRequest, defaults: DefaultSampling) -> RowSampling:
    """Return the request's sampling with every field resolved. Raises InvalidRequest for a `logit_bias` of no token."""
    temperature, top_p, top_k = request.temperature, request.top_p, request.top_k
    return RowSampling(
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=max(top_k or 0, 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=parse_logit_bias(request.logit_bias or {}),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def build_label_sampling(labels: Sequence[Label]) -> RowSampling:
    """Return the sampling of a row that reports the log probabilities of all tokens of these labels, in order."""
    return RowSampling(temperature=0.0, logprobs=0, score_ids=[each for label in labels for each in label.token_ids])


def _render_token_logprobs(harmony: Harmony, sampled_tokens: Sequence[SampledToken]) -> list[TokenLogprob | None]:
    return [
        None
        if sampled.logprob is None
        else harmony.build_token_logprob(sampled.token, sampled.logprob, sampled.top_logprobs)
        for sampled in sampled_tokens
    ]


def _summary(runner: LoadedRunner) -> str:
    tokens = runner.page_count * runner.page_tokens
    return (
        f"{runner.kv_bytes / GIB:.2f} GiB hold the keys and values of {tokens} tokens, {runner.slots} streams at once"
    )
