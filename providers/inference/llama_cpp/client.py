"""Client of the local engine: a ChatRequest in the dialect of llama.cpp's server, grammars, token counts."""

import asyncio
import hashlib
import json
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import SecretStr

from apis.chat import ChatRequest
from apis.completion import CompletionBatch, CompletionDelta, CompletionRequest
from apis.deltas import Delta, DeltaBatch, Usage
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import InvalidRequest, UpstreamError
from apis.sink import Sink, Stream
from providers.common.grammars.checks import GrammarSource, find_problem, relax_schema
from providers.common.net.http.client import HttpClient, headers_to_bytes
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.body import ChatDialect, body_to_json, request_to_body
from providers.inference.chat_completions.endpoint import (
    MAX_BODY_BYTES,
    ChatCompletions,
    EndpointLimits,
    PromptTemplate,
)
from providers.inference.chat_completions.errors import response_to_error
from providers.inference.chat_completions.reasoning_tags import ReasoningTags, TagSink
from providers.inference.chat_completions.refusals import ArrangedChat, ChatForms
from providers.inference.llama_cpp.engine import EngineAddress

PROBE_MARK: Final = "@#@"
SCHEMA_RULE: Final = "start: %json "
INVALID_GRAMMAR: Final = "invalid_grammar"
MAX_CAUSE_CHARS: Final = 300
SEED_RANGE: Final = 2**32 - 1
MAX_CONSTRAINT_VERDICTS: Final = 256
COMPOSITION_KEYWORDS: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties"})
UNSENT_FIELDS: Final[dict[str, None]] = dict.fromkeys(
    (
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop_token_ids", "repetition_penalty"),
        *("prompt_cache_key", "cache_salt", "priority", "verbosity", "seed"),
    )
)
LOOP_PENALTIES: Final[Mapping[str, Any]] = {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 12}
"""Penalty for repeating a passage of more than 12 tokens. Small models otherwise fill whole contexts with
repetition."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Grammar for the engine's output: the rules of an llguidance Lark grammar, and the request field that demands
    it. The parameters of a function have its `tool`, and their `schema`; keywords that no grammar can hold may be left
    out unless it is `strict`."""

    rules: str
    param: str
    code: str
    tool: str | None = None
    schema: Mapping[str, Any] = field(default_factory=dict[str, Any])
    strict: bool = False

    @property
    def grammar(self) -> str:
        return f"%llguidance {{}}\n{self.rules}"

    @property
    def is_schema(self) -> bool:
        return self.rules.startswith(SCHEMA_RULE)


def schema_to_constraint(
    schema: Mapping[str, Any],
    param: str,
    *,
    strict: bool,
    code: str = "invalid_json_schema",
    tool: str | None = None,
) -> Constraint:
    """Return a constraint to compact JSON of the schema. Unless `strict`, keywords unknown to the engine are
    ignored."""
    # The name of the dialect constrains nothing, and the engine would look it up.
    closed = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
    if "properties" in closed and not COMPOSITION_KEYWORDS & closed.keys():
        # Narrower than the schema, so still valid: without this, a small model invents properties endlessly.
        closed.setdefault("additionalProperties", False)
    closed["x-guidance"] = {"lenient": not strict, "whitespace_flexible": False}
    return Constraint(SCHEMA_RULE + json.dumps(closed), param, code, tool, closed, strict)


def regex_to_constraint(pattern: str, param: str) -> Constraint:
    """Return a constraint to text that matches the whole pattern."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", pattern, flags=re.DOTALL).replace("\n", "\\n")
    return Constraint(f"start: /{escaped}/", param, INVALID_GRAMMAR)


def lark_to_constraint(grammar: str, param: str) -> Constraint:
    """Return a constraint to text that matches the grammar's `start`."""
    return Constraint(grammar, param, INVALID_GRAMMAR)


class EngineClient:
    """Client of one started engine. `http` belongs to the caller; `verdicts` and `forms` are what earlier clients of
    the model have learned. `tags` are those that the model's template does not declare."""

    def __init__(
        self,
        address: EngineAddress,
        http: HttpClient,
        timeout_s: float,
        verdicts: RecentEntries[bytes, bool],
        forms: ChatForms,
        tags: ReasoningTags | None = None,
    ) -> None:
        self._address = address
        self._http = http
        self._timeout_s = timeout_s
        self._verdicts = verdicts
        self._forms = forms
        self._tags = tags

    def chat(
        self, request: ChatRequest, constraint: Constraint | None = None, **engine_fields: Any
    ) -> AsyncGenerator[DeltaBatch]:
        """Return the batches of `stream`."""
        return Stream[Delta](lambda sink: self.stream(request, sink, constraint, **engine_fields))

    async def stream(
        self, request: ChatRequest, sink: Sink[Delta], constraint: Constraint | None = None, **engine_fields: Any
    ) -> None:
        """Generate from messages only: tools and response format of the request are ignored. The constraint must have
        been checked, because the engine ignores a grammar that it cannot compile."""
        if constraint is not None:
            engine_fields["grammar"] = constraint.grammar
            engine_fields["chat_template_kwargs"] = {"enable_thinking": False}
        if request.repetition_penalty is not None:
            engine_fields["repeat_penalty"] = request.repetition_penalty
        if request.seed is not None:
            engine_fields["seed"] = request.seed % SEED_RANGE
        if self._tags is not None:
            engine_fields["reasoning_format"] = "none"
            if constraint is None:
                sink = TagSink(sink, request, self._tags)
        wire = self._open_wire("/v1", dialect=_build_dialect(engine_fields))
        await wire.stream(request.model_copy(update=UNSENT_FIELDS), sink)

    async def stream_with_template(self, request: ChatRequest, template: PromptTemplate, sink: Sink[Delta]) -> None:
        """Generate from a prompt of the template, whose path is below the engine's root."""
        await self._open_wire("", template=template).stream(request, sink)

    def complete(self, request: CompletionRequest, **engine_fields: Any) -> AsyncGenerator[CompletionBatch]:
        """Continue the prompt as it is."""
        seed = None if request.seed is None else request.seed % SEED_RANGE
        own = request.model_copy(update={"seed": seed, "cache_salt": None, "priority": None})
        return Stream[CompletionDelta | Usage](lambda sink: self._open_wire("/v1").complete(own, sink, engine_fields))

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return one vector per input."""
        return await self._open_wire("/v1").embed(request)

    def _open_wire(
        self, path: str, *, dialect: ChatDialect | None = None, template: PromptTemplate | None = None
    ) -> ChatCompletions:
        timeout_s = self._timeout_s
        return ChatCompletions(
            self._address.url + path,
            self._http,
            api_key=SecretStr(self._address.api_key),
            dialect=dialect,
            template=template,
            limits=EndpointLimits(headers_s=timeout_s, first_token_s=timeout_s, token_gap_s=timeout_s),
            forms=self._forms,
        )

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the prompt, with the model's own template around the messages."""
        chat = request.model_copy(update=UNSENT_FIELDS)
        return int((await self._post_chat("/v1/chat/completions/input_tokens", chat, {}))["input_tokens"])

    async def count_text_tokens(self, text: str) -> int:
        """Return the length of a text with the tokens that the model has around every text."""
        body = body_to_json({"content": text, "add_special": True})
        return len((await self._post("/tokenize", body, ""))["tokens"])

    async def find_token_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of the tokens that have these texts: of those texts that are one token, none with a line
        break."""
        content = "".join(f"\n{text}" for text in texts)
        body = {"content": content, "add_special": False, "parse_special": False, "with_pieces": True}
        tokens = (await self._post("/tokenize", body_to_json(body), ""))["tokens"]
        return {token["piece"]: token["id"] for token in tokens if isinstance(token["piece"], str)}

    async def decide(self, body: bytes, model: str) -> bytes:
        """Return the engine's answer to the questions of a System One request."""
        return await self._request_bytes("POST", "/v1/systemone", body, model)

    async def score_chat(self, request: ChatRequest, engine_fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's answer to a chat of one token, with the probabilities that the fields demand. Models
        that may reason do not."""
        fields = {
            **engine_fields,
            "max_completion_tokens": 1,
            "chat_template_kwargs": {"enable_thinking": False},
            "stream": False,
            "stream_options": None,
        }
        return await self._post_chat("/v1/chat/completions", request, fields)

    async def _post_chat(self, path: str, request: ChatRequest, engine_fields: Mapping[str, Any]) -> dict[str, Any]:
        def send(arranged: ChatRequest, dialect: ChatDialect) -> Awaitable[dict[str, Any]]:
            return self._post(path, request_to_body(arranged, dialect), request.model)

        return await ArrangedChat(request, _build_dialect(engine_fields), self._forms).submit(send)

    async def score_tokens(self, token_ids: Sequence[int], engine_fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's answer of one token to a prompt of tokens, with the probabilities that the fields
        demand."""
        body = {**engine_fields, "prompt": token_ids, "n_predict": 1}
        return await self._post("/completion", body_to_json(body), "")

    async def context_tokens(self) -> int:
        """Return the context length of one slot: the configured one, or the model's own if that is smaller."""
        props = await self._request_json("GET", "/props", None, "")
        return int(props["default_generation_settings"]["n_ctx"])

    async def is_drafting(self) -> bool:
        """Return true if the engine speculates: it ignores a model for it that does not fit."""
        return all(slot.get("speculative") is True for slot in await self._request_json("GET", "/slots", None, ""))

    async def read_metrics(self) -> str:
        """Return the engine's own figures in Prometheus' format."""
        return (await self._request_bytes("GET", "/metrics", None, "")).decode("utf-8", "replace")

    async def check_constraints(self, constraints: Sequence[Constraint], tenant: str) -> list[Constraint]:
        """Return the constraints that the engine enforces: those of functions without what no grammar can hold. Raises
        InvalidRequest naming the field of the first one that must hold and cannot."""
        checked = [await self._check_in_child(constraint, tenant) for constraint in constraints]
        schemas = [
            constraint for constraint in checked if constraint.is_schema and _digest(constraint) not in self._verdicts
        ]
        if len(schemas) > 1 and await self._compiles(_join_schemas(schemas)):
            for constraint in schemas:
                self._verdicts[_digest(constraint)] = True
        return [await self._check_in_engine(constraint, tenant) for constraint in checked]

    async def _check_in_child(self, constraint: Constraint, tenant: str) -> Constraint:
        """Compile the constraint where a grammar that ends its process ends no model."""
        is_valid = not await find_problem(GrammarSource(constraint.grammar), tenant)
        return constraint if is_valid else await _relax(constraint, tenant)

    async def _check_in_engine(self, constraint: Constraint, tenant: str) -> Constraint:
        """Have the engine compile the constraint: its compiler is of another version."""
        if await self._is_enforced(constraint):
            return constraint
        relaxed = await _relax(constraint, tenant)
        return relaxed if await self._is_enforced(relaxed) else _any_object(constraint)

    async def _is_enforced(self, constraint: Constraint) -> bool:
        is_valid = self._verdicts.find(_digest(constraint))
        if is_valid is None:
            is_valid = await self._compiles(constraint.rules)
            self._verdicts[_digest(constraint)] = is_valid
        return is_valid

    async def _compiles(self, rules: str) -> bool:
        """Return true if the engine enforces the rules. It ignores a grammar that does not compile, so the test is if
        it obeys one that starts with a mark that no model would write by itself."""
        marked = re.sub(r"\bstart\b", "probed_start", rules)
        probe = {
            "prompt": "Hello",
            "n_predict": len(PROBE_MARK),
            "temperature": 0,
            "cache_prompt": False,
            "grammar": f'%llguidance {{}}\nstart: "{PROBE_MARK}" probed_start\n{marked}',
        }
        completion = await self._post("/completion", json.dumps(probe).encode(), "")
        content = str(completion.get("content", ""))
        return bool(content) and content.startswith(PROBE_MARK[: len(content)])

    async def _post(self, path: str, body: bytes, model: str) -> dict[str, Any]:
        return await self._request_json("POST", path, body, model)

    async def _request_json(self, method: str, path: str, body: bytes | None, model: str) -> Any:
        try:
            return json.loads(await self._request_bytes(method, path, body, model))
        except ValueError as exc:
            raise UpstreamError("The local engine (llama.cpp) sent an answer that is not valid.") from exc

    async def _request_bytes(self, method: str, path: str, body: bytes | None, model: str) -> bytes:
        headers = {"Authorization": f"Bearer {self._address.api_key}", "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._http.send(
                    method, self._address.url + path, headers_to_bytes(headers), body, self._timeout_s
                )
                try:
                    body_bytes = await connection.read_body(MAX_BODY_BYTES, math.inf)
                    if connection.status != 200:
                        raise response_to_error(connection.status, body_bytes, connection.headers, model)
                finally:
                    self._http.release(connection)
            return body_bytes
        except OSError as exc:
            raise UpstreamError("The local engine (llama.cpp) did not answer.") from exc


def _build_dialect(engine_fields: Mapping[str, Any]) -> ChatDialect:
    # The engine tokenizes the finished prompt, so markup in a text would become the model's own control tokens.
    return ChatDialect(
        engine="vllm",
        reasoning_field="reasoning_content",
        neutralize_control_tokens=True,
        extra_body=engine_fields,
    )


def _join_schemas(schemas: Sequence[Constraint]) -> str:
    return "start: " + " | ".join(constraint.rules.removeprefix("start: ") for constraint in schemas)


def _digest(constraint: Constraint) -> bytes:
    return hashlib.sha256(constraint.rules.encode("utf-8", "surrogatepass")).digest()


async def _relax(constraint: Constraint, tenant: str) -> Constraint:
    """Return the constraint without what no grammar can hold. Raises InvalidRequest if all of it must hold."""
    if constraint.tool is None:
        raise _build_refusal(constraint)
    relaxed = await relax_schema(constraint.schema, tenant)
    if constraint.strict:
        raise _build_refusal(constraint, relaxed.left_out if relaxed is not None else ())
    if relaxed is None:
        return _any_object(constraint)
    schema = {**relaxed.schema, "type": "object"}
    loose = schema_to_constraint(schema, constraint.param, strict=False, tool=constraint.tool)
    return loose if not await find_problem(GrammarSource(loose.grammar), tenant) else _any_object(constraint)


def _any_object(constraint: Constraint) -> Constraint:
    return schema_to_constraint({"type": "object"}, constraint.param, strict=False, tool=constraint.tool)


def _build_refusal(constraint: Constraint, left_out: Sequence[Sequence[str]] = ()) -> InvalidRequest:
    subject = "The grammar" if constraint.code == INVALID_GRAMMAR else "The schema"
    owner = f"of the function '{constraint.tool}' " if constraint.tool is not None else ""
    places = [f"'{place[-1]}' at {'/'.join(place[:-1]) or 'its root'}" for place in left_out]
    cause = f": {', '.join(places)[:MAX_CAUSE_CHARS]}" if places else ""
    return InvalidRequest(
        f"{subject} {owner}in {constraint.param} is not valid, or uses what the local engine cannot enforce{cause}.",
        param=constraint.param,
        code=constraint.code,
    )
