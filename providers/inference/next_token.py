"""NextToken: a gpt-oss model as a Python function that returns the next token. The way to use an engine of one's
own."""

import asyncio
import importlib
import importlib.util
import inspect
import logging
import operator
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, SupportsIndex

from pydantic import Field

from apis.chat import ENGINE_OPTIONS, ChatRequest, share_of_salt
from apis.deltas import DeltaBatch
from apis.errors import (
    ConfigError,
    ContextLengthExceeded,
    ModelNotFound,
    Overloaded,
    RateLimited,
    Unsupported,
    UpstreamError,
    UpstreamTimeout,
)
from apis.fair_share import ONE_TENANT, FairShare, Place, Tenants
from apis.inference import ALL_CONSTRAINTS, Inference, Modality, Model
from apis.provider import Provider
from apis.wire.base import Effort
from providers.inference.harmony.grammar import TurnGrammar
from providers.inference.harmony.harmony import Harmony, HarmonyPrompt
from providers.inference.harmony.matcher import GrammarMatcher
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.harmony.vocabulary import NATIVE_TOOLS, STOP_IDS, VOCABULARY_SIZE

UNSUPPORTED_FIELDS: Final[dict[str, tuple[Any, ...]]] = {
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "logit_bias": ({},),
    "seed": (),
    "logprobs": (False,),
    **dict.fromkeys(ENGINE_OPTIONS, ()),
}
"""Request fields that concern the choice of a token, which is the function's, with the values that change nothing."""

NextTokenFunction = Callable[[list[int], float, bool], SupportsIndex]

logger = logging.getLogger(__name__)


class NextToken(Inference):
    """Provider over a function that takes all tokens so far and the temperature, and returns the next token's id. A
    third parameter, or one named `new_request`, is true for the first token of each turn.

    The function is called in a thread. Unless it is `concurrent`, one generation ends before the next begins.
    Constraints of a request beyond the temperature (a schema, a forced call) are checked, not enforced: output that
    violates them fails.
    """

    class Config(Provider.Config):
        """`function` is "package.module:function" or "path/to/file.py:function". `context_tokens` bounds prompt and
        output together. Tenants take turns; `max_waiting` requests of one may wait. `harmony` sets the content of the
        system message."""

        function: str
        model: str = "next-token"
        temperature: float = Field(default=1, ge=0, le=2)
        context_tokens: int = Field(default=131_072, ge=1)
        concurrent: bool = False
        max_running: int = Field(default=8, ge=1)
        max_waiting: int = Field(default=32, ge=0)
        token_timeout_s: float = Field(default=60, gt=0)
        harmony: HarmonyOptions = HarmonyOptions()

    def __init__(self, config: Config, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._function: NextTokenFunction | None = None
        self._harmony: Harmony | None = None
        self._executor: ThreadPoolExecutor | None = None
        running = config.max_running if config.concurrent else 1
        self._places = FairShare(
            "requests to the model",
            running,
            tenant_places=max(1, running - 1),
            tenant_waiting=config.max_waiting,
            several_tenants=tenants.are_several,
        )
        self._started_at = 0

    async def start(self) -> None:
        """Import the function's module, which may load a model, and load the vocabulary. Raises ConfigError."""
        self._harmony = await Harmony.load(self._config.harmony)
        self._function = await asyncio.to_thread(_load_function, self._config.function)
        threads = self._config.max_running if self._config.concurrent else 1
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="next_token")
        self._started_at = int(time.time())

    async def close(self) -> None:
        """Shut down without waiting for a call in progress."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._function = self._harmony = self._executor = None

    async def models(self) -> Sequence[Model]:
        """Return the one configured model."""
        return [
            Model(
                id=self._config.model,
                owned_by="stack",
                created=self._started_at,
                context_tokens=self._config.context_tokens,
                modalities=frozenset[Modality](),
                native_tools=NATIVE_TOOLS,
                enforces=ALL_CONSTRAINTS,
            )
        ]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """See `Inference.chat`. Closing the generator ends the generation after the current token."""
        prompt = await self._render_prompt(request)
        context = self._config.context_tokens
        if len(prompt.token_ids) >= context:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt.token_ids)} tokens; the model's context is {context}."
            )
        tenant = share_of_salt(request.cache_salt)
        matcher = None if prompt.grammar is None else await self._build_matcher(prompt.grammar, tenant)
        reader, stops = self._get_harmony().build_reader(request), {*STOP_IDS, *(request.stop_token_ids or ())}
        limit = min(request.max_completion_tokens or context, context - len(prompt.token_ids))
        temperature = self._config.temperature if request.temperature is None else request.temperature
        tokens, token = [*prompt.token_ids], -1
        with await self._acquire_place(request):
            for count in range(limit):
                token = await self._next_token(tokens, temperature, new_request=count == 0)
                if matcher is not None and not matcher.accept(token):
                    raise UpstreamError("The model's function did not keep to what this request demands.")
                tokens.append(token)
                if batch := reader.feed([token]):
                    yield batch
                if token in stops or reader.is_stopped:
                    break
        reason = "stop" if token in stops or reader.is_stopped else "length"
        yield reader.finish(reason, input_tokens=len(prompt.token_ids), cached_tokens=0)

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return the effort of the system message that is rendered here."""
        return self._config.harmony.used_effort(request.reasoning_effort)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the rendered prompt."""
        return len((await self._render_prompt(request)).token_ids)

    async def _render_prompt(self, request: ChatRequest) -> HarmonyPrompt:
        if request.model != self._config.model:
            raise ModelNotFound(request.model, [self._config.model])
        for name, nothing in UNSUPPORTED_FIELDS.items():
            value = getattr(request, name)
            if value is not None and value not in nothing:
                raise Unsupported(f"'{name}' is not supported by this model.", param=name)
        return await self._get_harmony().render_prompt(request)

    async def _build_matcher(self, grammar: TurnGrammar, tenant: str) -> GrammarMatcher:
        # Compiled at first use: it takes a second, and most requests need no grammar.
        await self._get_harmony().prepare_grammar_compiler()
        return await self._get_harmony().build_matcher(grammar, tenant)

    async def _next_token(self, tokens: list[int], temperature: float, *, new_request: bool) -> int:
        """Call the function once. Raises UpstreamError for every failure of the function."""
        assert self._function is not None
        assert self._executor is not None
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._executor, self._function, tokens, temperature, new_request)
        timeout_s = self._config.token_timeout_s
        try:
            done, _ = await asyncio.wait([call], timeout=timeout_s)
        finally:
            call.cancel()  # no effect on a finished call
        if not done:
            raise UpstreamTimeout(f"The model's function made no token within token_timeout_s ({timeout_s:g} s).")
        error = call.exception()
        if error is not None:
            logger.error("The function %s failed.", self._config.function, exc_info=error)
            raise UpstreamError(f"The model's function failed with {type(error).__name__}.") from error
        return _parse_token(call.result())

    async def _acquire_place(self, request: ChatRequest) -> Place:
        try:
            return await self._places.acquire(share_of_salt(request.cache_salt))
        except RateLimited as exc:
            message = "Too many requests are waiting for this model. Try again shortly."
            raise Overloaded(message, retry_after_s=1) from exc

    def _get_harmony(self) -> Harmony:
        if self._harmony is None:
            raise RuntimeError("NextToken is used before start or after close")
        return self._harmony


def _parse_token(value: SupportsIndex) -> int:
    """Return the token id from any integer type, including tensors of one element. Raises UpstreamError for anything
    else."""
    try:
        token = operator.index(value)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise UpstreamError(f"The model's function returned no token but a {type(value).__name__}.") from exc
    if isinstance(value, bool) or not 0 <= token < VOCABULARY_SIZE:
        raise UpstreamError(f"The model's function returned {value!r:.40}, which is no token of the vocabulary.")
    return token


def _load_function(name: str) -> NextTokenFunction:
    """Return the function in its three-argument form. An error raised by the module itself is passed on."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigError(f'function: "{name}" is not of the form "package.module:function" or "file.py:function".')
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f'function: "{where}" has no function "{attribute}".')
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"function: {name} is async; it must be a plain function, which is called in a thread.")
    return _with_three_arguments(name, function)


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise  # the module exists, but an import of its own fails
        raise ConfigError(f'function: there is no module "{name}".') from None


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"next_token_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f'function: there is no file "{path}".')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with_three_arguments(name: str, function: Any) -> NextTokenFunction:
    signature = inspect.signature(function)
    parameter = signature.parameters.get("new_request")
    if parameter is not None and parameter.kind is parameter.KEYWORD_ONLY:
        return lambda tokens, temperature, new_request: function(tokens, temperature, new_request=new_request)
    for count in (3, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return function if count == 3 else lambda tokens, temperature, _: function(tokens, temperature)
    raise ConfigError(f"function: {name} must take (tokens, temperature) or (tokens, temperature, new_request).")
