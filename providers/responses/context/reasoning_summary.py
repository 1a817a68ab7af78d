"""Summaries of the model's reasoning, for requests that ask for them: the reasoning itself, or a summary of it by a
model that the run config names."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from apis.chat import ChatRequest, Message
from apis.deltas import DelayedOutput, Delta, DeltaBatch, ReasoningDelta, ReasoningSummaryDelta, TextDelta
from apis.errors import StackError
from apis.inference import Inference
from apis.sink import Sink
from providers.common.wrapped_inference import WrappedInference

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 20.0
"""Seconds that a summary may take; the answer waits for it."""
_MAX_INPUT_CHARS: Final = 48_000
"""Characters of reasoning that the summarizing model reads: of longer reasoning the end, which led to the answer."""
_MAX_TOKENS: Final = 1024
"""Longest summary in tokens, the summarizing model's own reasoning included."""
_LENGTHS: Final = {
    "concise": "in one or two sentences",
    "auto": "in one short paragraph",
    "detailed": "in at most four short paragraphs",
}
_PROMPT: Final = """\
Below are the private notes that an assistant made while it worked on a request. Sum up for the user {length} how the \
assistant went about it: what it considered and what it decided, in the first person, plainly, in the language of the \
notes. Add nothing that the notes do not say, do not answer the request, and write only the summary.

<notes>
{notes}
</notes>"""


class SummarizingInference(WrappedInference):
    """Wraps an Inference, and follows each run of reasoning deltas by a summary of it. Without `summary_model` the
    summary is the reasoning itself; so it is where that model fails or takes too long. Without `repeats_reasoning`
    there is no summary then."""

    def __init__(
        self, inference: Inference, style: str, summary_model: str | None, *, repeats_reasoning: bool = True
    ) -> None:
        super().__init__(inference)
        self._length = _LENGTHS[style]
        self._summary_model = summary_model
        self._repeats_reasoning = repeats_reasoning

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        await self._inference.stream(request, _SummarySink(sink, lambda text: self._summarize(text, request)))

    async def _summarize(self, reasoning: str, request: ChatRequest) -> AsyncGenerator[ReasoningSummaryDelta]:
        if not reasoning.strip():
            return
        begun = False
        if self._summary_model is not None:
            prompt = _PROMPT.format(length=self._length, notes=reasoning[-_MAX_INPUT_CHARS:])
            fields = {
                "model": self._summary_model,
                "max_completion_tokens": _MAX_TOKENS,
                "cache_salt": request.cache_salt,
            }
            chat = ChatRequest.model_validate({**fields, "messages": [Message(role="user", content=prompt)]})
            try:
                async with asyncio.timeout(_TIMEOUT_S), aclosing(self._inference.chat(chat)) as batches:
                    async for batch in batches:
                        for delta in batch:
                            if isinstance(delta, TextDelta) and delta.text:
                                begun = True
                                yield ReasoningSummaryDelta(delta.text)
            except (StackError, TimeoutError) as exc:
                _log.warning("a summary of reasoning by %s failed: %s", self._summary_model, exc or "it took too long")
        if not begun and self._repeats_reasoning:
            yield ReasoningSummaryDelta(reasoning)


class _SummarySink(Sink[Delta]):
    """Passes the deltas on, and the summary of each run of reasoning before the delta that ends it, which waits for
    it."""

    def __init__(self, sink: Sink[Delta], summarize: Callable[[str], AsyncGenerator[ReasoningSummaryDelta]]) -> None:
        self._sink = sink
        self._summarize = summarize
        self._reasoning: list[str] = []
        self._waiting: DeltaBatch = ()

    def write(self, batch: DeltaBatch) -> bool:
        output = self._take(batch)
        is_ready = self._sink.write(output) if output else True
        return is_ready and not self._waiting

    async def put(self, batch: DeltaBatch) -> None:
        if output := self._take(batch):
            await self._sink.put(output)
        await self._put_summary()

    async def ready(self) -> None:
        await self._sink.ready()
        await self._put_summary()

    def _take(self, batch: DeltaBatch) -> DeltaBatch:
        """Return what leaves before the next summary."""
        for index, delta in enumerate(batch):
            is_reasoning = isinstance(delta, ReasoningDelta)
            ends_reasoning = delta.begins_message if is_reasoning else not isinstance(delta, DelayedOutput)
            if self._reasoning and ends_reasoning:
                self._waiting = batch[index:]
                return batch[:index]
            if is_reasoning:
                self._reasoning.append(delta.text)
        return batch

    async def _put_summary(self) -> None:
        if not self._waiting:
            return
        text, batch = "".join(self._reasoning), self._waiting
        self._reasoning, self._waiting = [], ()
        async with aclosing(self._summarize(text)) as summary:
            async for delta in summary:
                await self._sink.put((delta,))
        await self.put(batch)
