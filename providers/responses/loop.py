"""Loop: responses as turns of a chat model with tools run in between.

Two generators. The outer one owns the life of a response: it begins and ends it, numbers its events, keeps it, and
makes a failure of what goes wrong. The inner one (turns.py) runs turns and tools, and knows nothing of that.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseStreamEvent,
)
from pydantic import Field

from apis.errors import InvalidRequest, StackError, Unsupported, UpstreamTimeout, error_to_failure, internal_error
from apis.inference import Inference
from apis.kv_store import KVStore
from apis.provider import Provider
from apis.responses import CreateResponse, InputItemsPage, ItemList, Responses, WebSearchTool
from apis.tool_runtime import ToolRuntime
from providers.responses.chat_request import build_chat, refuse_unsupported
from providers.responses.conversation import Conversation, read_conversation
from providers.responses.envelope import Status, begin_response, end_response
from providers.responses.history import History
from providers.responses.hosted.call import HostedTool
from providers.responses.hosted.web_search import NAME as WEB_SEARCH
from providers.responses.hosted.web_search import WebSearch
from providers.responses.ids import Ids
from providers.responses.turn import Output
from providers.responses.turns import Turns

_log = logging.getLogger(__name__)

Events = Sequence[ResponseStreamEvent]
_PROMPT_FAILURE_S = 0.04
"""How long the first event waits for the model, so that what is refused at once is refused by an HTTP status."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One response being made."""

    request: CreateResponse
    tenant: str
    conversation: Conversation
    ids: Ids
    output: Output
    turns: Turns
    created_at: int

    def begin(self) -> Response:
        """The response as it began. Made anew where it is needed: held, it would be most of an open stream's memory."""
        return begin_response(self.request, self.ids.response, self.created_at)


class Loop(Responses):
    """The Responses API over one Inference, one KVStore and, where there is one, a ToolRuntime."""

    class Config(Provider.Config):
        """`retention_days` after their last use, responses are forgotten; `max_turns` bounds a chain;
        `cache_bytes` of the last conversations are kept in memory, as they are stored."""

        retention_days: float = Field(30, gt=0)
        sweep_interval_s: float = Field(600, gt=0)
        max_turns: int = Field(1000, ge=1)
        cache_bytes: int = Field(64 * 1024 * 1024, ge=0)
        max_tool_calls: int = Field(32, ge=1)
        response_timeout_s: float = Field(600, gt=0)

    def __init__(
        self, config: Config, inference: Inference, kv_store: KVStore, tool_runtime: ToolRuntime | None
    ) -> None:
        self._config = config
        self._inference = inference
        self._kv = kv_store
        self._tool_runtime = tool_runtime
        self._history = History(
            kv_store,
            retention_s=config.retention_days * 86_400,
            max_turns=config.max_turns,
            cache_bytes=config.cache_bytes,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)

    async def create(self, request: CreateResponse, *, tenant: str) -> AsyncGenerator[Events]:
        run = await self._prepare(request, tenant)
        number = 0
        async with aclosing(self._live(run)) as batches:
            async for events in batches:
                for event in events:
                    event.sequence_number = number
                    number += 1
                yield events

    async def get(self, response_id: str, *, tenant: str) -> Response:
        return await self._history.response(response_id, tenant=tenant)

    async def delete(self, response_id: str, *, tenant: str) -> None:
        await self._history.delete(response_id, tenant=tenant)

    async def cancel(self, response_id: str, *, tenant: str) -> Response:
        await self._history.response(response_id, tenant=tenant)
        raise InvalidRequest("Only a response that was made with `background` can be cancelled.", param="response_id")

    async def input_items(self, response_id: str, page: InputItemsPage, *, tenant: str) -> ItemList:
        items = await self._history.given(response_id, tenant=tenant)
        if page.order == "desc":
            items.reverse()
        if page.after is not None:
            ids = [item["id"] for item in items]
            if page.after not in ids:
                raise InvalidRequest(f"No input item has the id '{page.after}'.", param="after", code="invalid_value")
            items = items[ids.index(page.after) + 1 :]
        shown = items[: page.limit]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return ItemList(data=shown, first_id=first, last_id=last, has_more=len(items) > len(shown))

    async def count_input_tokens(self, request: CreateResponse, *, tenant: str) -> int:
        run = await self._prepare(request, tenant)
        return await self._inference.count_tokens(run.turns.chat)

    async def _prepare(self, request: CreateResponse, tenant: str) -> _Run:
        """Everything that can be refused before a response exists."""
        refuse_unsupported(request)
        hosted = self._hosted(request)
        conversation = await read_conversation(request, self._history, tenant=tenant)
        ids = Ids()
        output = Output(ids)
        chat = build_chat(request, conversation.messages(), hosted)
        limit = request.max_tool_calls or self._config.max_tool_calls
        turns = Turns(self._inference, chat, conversation, output, hosted, limit)
        return _Run(request, tenant, conversation, ids, output, turns, int(time.time()))

    def _hosted(self, request: CreateResponse) -> Mapping[str, HostedTool]:
        hosted: dict[str, HostedTool] = {}
        for index, tool in enumerate(request.tools or ()):
            if not isinstance(tool, WebSearchTool):
                continue
            runtime = self._tool_runtime
            if runtime is None or all(spec.name != "search" for spec in runtime.tools()):
                if tool.external_web_access is False:
                    continue  # agents declare this one always, and expect little of it
                raise Unsupported(
                    "No web search is configured: give the run config's `tool_runtime` a search provider and its key.",
                    param=f"tools[{index}].type",
                )
            hosted[WEB_SEARCH] = WebSearch(tool, request, runtime)
        return hosted

    async def _live(self, run: _Run) -> AsyncGenerator[Events]:
        """The outer generator, but for the numbers."""
        deadline = time.monotonic() + self._config.response_timeout_s
        begun = False
        try:
            async with aclosing(run.turns.run()) as batches:
                if run.request.stream:
                    async with _head_start(batches) as first:
                        begun = True
                        yield _beginning(run.begin())
                        if events := await first:
                            yield events
                    del first
                async for events in batches:
                    begun = True
                    yield events
                    if time.monotonic() > deadline:
                        raise _too_long(self._config.response_timeout_s)
            yield [await self._end(run)]
        except (GeneratorExit, asyncio.CancelledError):
            if begun:
                self._leave(run)
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # the stream's outer edge; a native panic is no Exception
            if not begun:
                raise
            error = exc if isinstance(exc, StackError) else _bug(exc, run.ids.response)
            yield await self._fail(run, error)
            raise error from exc

    async def _end(self, run: _Run) -> ResponseStreamEvent:
        """The terminal event of a response that came to its end. It is in the store before it is told."""
        reason = run.turns.reason
        status: Status = "incomplete" if reason else "completed"
        final = end_response(run.begin(), status, run.output.finished(), run.turns.usage, reason=reason)
        await self._keep(run, final)
        if reason:
            return ResponseIncompleteEvent(type="response.incomplete", response=final, sequence_number=0)
        return ResponseCompletedEvent(type="response.completed", response=final, sequence_number=0)

    async def _fail(self, run: _Run, error: StackError) -> Events:
        """The last events of a response that failed: what is open ends incomplete, and the cause is told."""
        events = run.turns.break_off()
        failure = error_to_failure(error)
        final = end_response(run.begin(), "failed", run.output.finished(), run.turns.usage, error=failure)
        try:
            await self._keep(run, final)
        except StackError as exc:
            _log.warning("a failed response was not stored: %s", exc.message)
        return [*events, ResponseFailedEvent(type="response.failed", response=final, sequence_number=0)]

    def _leave(self, run: _Run) -> None:
        """Nobody listens any more: keep what there is, in a task, because whoever called is being cancelled."""
        run.turns.break_off()
        final = end_response(run.begin(), "cancelled", run.output.finished(), run.turns.usage)
        task = asyncio.create_task(self._keep_quietly(run, final))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, run: _Run, final: Response) -> None:
        if run.request.store is not False:
            given = run.conversation.given_json(run.ids)
            await self._history.save(final, given, run.turns.told, tenant=run.tenant, past=run.conversation.past)

    async def _keep_quietly(self, run: _Run, final: Response) -> None:
        try:
            await self._keep(run, final)
        except StackError as exc:
            _log.warning("a cancelled response was not stored: %s", exc.message)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_interval_s)
            try:
                swept = await self._kv.sweep()
                _log.debug("swept %d expired entries", swept)
            except StackError as exc:
                _log.warning("sweeping the store failed: %s", exc.message)


@asynccontextmanager
async def _head_start(batches: AsyncGenerator[Events]) -> AsyncGenerator[asyncio.Task[Events]]:
    """The first batch, under way. It is waited for briefly, so that what the model refuses at once is raised here."""

    async def first() -> Events:
        try:
            return await anext(batches)
        except StopAsyncIteration:  # anext's own default may not be a tuple: Python 3.11 fails on it
            return ()

    task = asyncio.create_task(first())
    try:
        await asyncio.wait({task}, timeout=_PROMPT_FAILURE_S)
        if task.done():
            task.result()
        yield task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def _beginning(response: Response) -> Events:
    return [
        ResponseCreatedEvent(type="response.created", response=response, sequence_number=0),
        ResponseInProgressEvent(type="response.in_progress", response=response, sequence_number=0),
    ]


def _too_long(limit_s: float) -> UpstreamTimeout:
    return UpstreamTimeout(f"The response took longer than {limit_s:g} s (`responses.response_timeout_s`).")


def _bug(exc: BaseException, response_id: str) -> StackError:
    _log.error("response %s failed on a bug", response_id, exc_info=exc)
    return internal_error(response_id)
