"""Moderation of one request: its input before a model is asked, and what the model writes before it leaves."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from apis.accounts.charges import Use
from apis.accounts.usage import count_one_request
from apis.chat import ChatRequest, TextPart
from apis.deltas import Delta, DeltaBatch, Finish, Usage, count_delayed, estimate_tokens, measure_deltas
from apis.errors import InvalidRequest, StackError, Unsupported, UpstreamError
from apis.inference import Inference
from apis.moderation import Moderation, ModerationScores, OutputBlocked
from apis.sink import Sink
from apis.wire.request_options import ModerationOptions
from providers.common.chat_tokens import measure_chat
from providers.common.wrapped_inference import WrappedInference

BLOCKED_CODE: Final = "moderation_blocked"
"""Code of the error of input that is blocked, which is stored nowhere."""
_OVERLAP_PART: Final = 2
"""A window is judged together with this part of its length of the text before it."""
_ESCAPED_CHAR: Final = re.compile(r"\\u([0-9a-fA-F]{4})")


CountUse = Callable[[Use], None]
"""Counts what was used for a request besides the answer of its model."""


class RequestModeration:
    """The moderation that one request asks for, and what it has found."""

    def __init__(
        self,
        moderation: Moderation | None,
        options: ModerationOptions,
        cache_salt: str | None,
        count_use: CountUse | None = None,
    ) -> None:
        """Raises Unsupported without a `moderation`, and InvalidRequest for a model that does not moderate here. What
        each judgement has used is counted by `count_use`."""
        if moderation is None:
            raise Unsupported(
                "This server moderates nothing: its config has no section `moderation`.",
                param="moderation",
                code="not_configured",
            )
        moderation.require_name(options.model, "moderation.model")
        self._moderation = moderation
        self._cache_salt = cache_salt
        self._count_use = count_use
        self._blocks_input = options.blocks_input
        self.blocks_output = options.blocks_output
        self.window_chars = moderation.window_chars
        self._input: ModerationScores | StackError | None = None
        self._output: ModerationScores | StackError | None = None

    @property
    def input_scores(self) -> ModerationScores | None:
        """The scores of the input; None before it was judged, and where that failed."""
        return self._input if isinstance(self._input, ModerationScores) else None

    @property
    def output_scores(self) -> ModerationScores | None:
        """The scores of the output so far; None where nothing was judged, or that failed."""
        return self._output if isinstance(self._output, ModerationScores) else None

    def restore(self, input_scores: ModerationScores | None, output_scores: ModerationScores | None) -> None:
        """Go on with what another worker has found."""
        self._input, self._output = input_scores, output_scores

    async def judge_input(self, texts: Sequence[str], param: str) -> None:
        """Judge the texts of the user and the outputs of the client's tools, which are in the field `param`. Raises
        InvalidRequest for flagged ones that are to be blocked, and the error of the moderation that is to block
        them."""
        try:
            self._input = await self._judge("\n\n".join(texts), param)
        except StackError as exc:
            if self._blocks_input:
                raise
            self._input = exc
            return
        if self._blocks_input and self._input.flagged:
            listed = ", ".join(sorted(self._input.flagged))
            raise InvalidRequest(
                f"The input was blocked by moderation: {listed}.", param=param, code="moderation_blocked"
            )

    async def judge_output(self, text: str) -> None:
        """Judge a piece of the output, with the end of the one before it. Raises OutputBlocked for a flagged one that
        is to be blocked, and UpstreamError for a moderation that is to block it and fails."""
        try:
            scores = await self._judge(text, "output")
        except StackError as exc:
            self._output = exc
            if not self.blocks_output:
                return
            error = UpstreamError(f"The output could not be moderated: {exc.message}")
            error.is_of_receiver = True  # the model that wrote it is not to blame
            raise error from exc
        if not isinstance(self._output, StackError):
            self._output = scores if self._output is None else self._output.joined_with(scores)
        if self.blocks_output and scores.flagged:
            raise OutputBlocked

    async def _judge(self, text: str, param: str) -> ModerationScores:
        scores = await self._moderation.judge([TextPart(text=text)], param=param, cache_salt=self._cache_salt)
        if self._count_use is not None:
            counts = count_one_request(scores.usage, {})
            self._count_use(Use(scores.model, counts, category="moderations"))
        return scores

    def build_results(self) -> dict[str, dict[str, Any]]:
        """Return the results of input and output, or their errors, as responses show them. Output that was not judged,
        because there is none, is not flagged."""
        return {"input": self._to_json(self._input), "output": self._to_json(self._output)}

    def _to_json(self, result: ModerationScores | StackError | None) -> dict[str, Any]:
        if isinstance(result, StackError):
            return {"type": "error", "code": result.code or result.failure_code, "message": result.message}
        if result is None:
            result = ModerationScores.of_nothing(self._moderation.model)
        return {"type": "moderation_result", "model": result.model, **result.to_json()}


class ModeratedInference(WrappedInference):
    """Wraps an Inference whose answers are moderated: text, reasoning and arguments of calls.

    Where flagged output is blocked, what the model writes waits until a window of it is judged. A flagged window does
    not leave, and the answer ends as one that a content filter has cut. Else the whole answer is judged at its end.
    """

    def __init__(self, inference: Inference, moderation: RequestModeration) -> None:
        super().__init__(inference)
        self._moderation = moderation

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        answer = _JudgedAnswer(sink, self._moderation)
        try:
            await self._inference.stream(request, answer)
        except OutputBlocked:
            usage = answer.usage or Usage(measure_chat(request), answer.estimate_output())
            await sink.put((Finish("content_filter", usage),))


class _JudgedAnswer(Sink[Delta]):
    """Takes the deltas of one answer and passes on those that may leave."""

    def __init__(self, sink: Sink[Delta], moderation: RequestModeration) -> None:
        self._sink = sink
        self._moderation = moderation
        self._waiting: list[Delta] = []
        self._texts: list[str] = []
        self._chars = 0
        self._overlap = ""
        self._must_judge = False
        self._delta_count = self._char_count = 0
        self.usage: Usage | None = None

    def estimate_output(self) -> int:
        """Return an estimate of the tokens that the model has written."""
        return estimate_tokens(self._delta_count, self._char_count)

    def write(self, batch: DeltaBatch) -> bool:
        count, chars = measure_deltas(batch)
        self._delta_count += count
        self._char_count += chars
        self._texts += [text for delta in batch if (text := getattr(delta, "text", ""))]
        self._chars += chars
        if batch and isinstance(finish := batch[-1], Finish):
            self.usage = finish.usage
            self._must_judge = True
        elif not self._moderation.blocks_output:
            return self._sink.write(batch)
        elif self._chars >= self._moderation.window_chars:
            self._must_judge = True
        self._waiting += batch
        if self._must_judge:
            return False
        delayed = count_delayed(batch, ())
        return self._sink.write(delayed) if delayed else True

    async def ready(self) -> None:
        await self._sink.ready()
        if self._must_judge:
            await self._judge()

    async def _judge(self) -> None:
        """Judge what is held, and pass it on."""
        text = _read_escapes(self._overlap + "".join(self._texts))
        if self._texts:
            await self._moderation.judge_output(text)
        waiting, self._waiting = self._waiting, []
        overlap_chars = self._moderation.window_chars // _OVERLAP_PART if self._moderation.blocks_output else 0
        self._overlap = text[-overlap_chars:] if overlap_chars else ""
        self._texts, self._chars, self._must_judge = [], 0, False
        await self._sink.put(count_delayed((), waiting))


def _read_escapes(text: str) -> str:
    """Return the text with the characters that JSON writes as `\\uXXXX`, as the receiver of a call reads its arguments.
    Half an escape at the end stays, and is whole together with what follows."""
    if "\\u" not in text:
        return text
    read = _ESCAPED_CHAR.sub(lambda escape: chr(int(escape[1], 16)), text)
    return read.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
