"""The inner loop: the model answers, the server runs its own tools, the model goes on, until it wants no more here."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

from openai.types.responses import ResponseOutputItemDoneEvent, ResponseStreamEvent
from openai.types.responses.response_output_item import McpListTools

from apis.chat import ChatRequest, Message
from apis.deltas import Finish, Usage
from apis.errors import StackError, ToolFailed, UpstreamError
from apis.inference import Inference
from apis.wire.items import Item
from providers.responses.context.compaction import Compacting
from providers.responses.context.conversation import Conversation
from providers.responses.events.output import Output
from providers.responses.events.response_object import Reason, add_usage
from providers.responses.events.tool_result import Told
from providers.responses.run.checkpoint import SoFar, Step, lost
from providers.responses.run.concurrency import Put, side_by_side
from providers.responses.run.turn import Turn, joined
from providers.responses.store.history import ITEMS, items_to_json
from providers.responses.tools.call import HostedCall
from providers.responses.tools.choice_policy import Demand
from providers.responses.tools.offered import Toolbox

_log = logging.getLogger(__name__)

Events = Sequence[ResponseStreamEvent]
_MAX_REPEATS: Final = 5
_MAX_REJECTED_TURNS: Final = 3
_MAX_ASKED: Final = 2
"""How often a model is asked for a call that is demanded."""
_MAX_CALLS_OF_A_TURN: Final = 64
_REASONS: Final[Mapping[str, Reason]] = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one response: hosted calls in all, how many of them at a time, and seconds for each."""

    calls: int
    parallel_calls: int
    tool_timeout_s: float


class Turns:
    """The turns of one response. `usage`, `told` and `reason` are right whenever `run` is not running; `on_step` is
    given each step at which somebody else could go on, when all events before it have been taken."""

    def __init__(
        self,
        inference: Inference,
        chat: ChatRequest,
        conversation: Conversation,
        output: Output,
        toolbox: Toolbox,
        limits: Limits,
    ) -> None:
        self.usage = Usage()
        self.told: dict[str, Told] = conversation.told_by_given()
        self.reason: Reason | None = None
        self._inference = inference
        self.chat = chat
        self._conversation = conversation
        self._output = output
        self._toolbox = toolbox
        self._limits = limits
        self._budget = chat.max_completion_tokens
        self._calls_left = limits.calls
        self._asked: list[tuple[str, str]] = []
        self._number = 0
        self._turn: Turn | None = None
        self.on_step: Callable[[Step], None] | None = None
        self._noted = 0
        self._running: Sequence[HostedCall] = ()
        self._unasked: list[HostedCall] = []
        self._rejected: list[tuple[int, Told]] = []
        self._rejected_turns = 0
        self._unmet = 0
        self._ran = 0
        self.compacting: Compacting | None = None

    def go_on(self, so_far: SoFar) -> None:
        """Go on from there instead of from the beginning."""
        step = so_far.step
        self._output.items[:] = so_far.items
        self.usage, self.told, self._noted = step.usage, {**so_far.told}, len(so_far.told)
        self._number, self._calls_left, self._asked = step.turn, step.calls_left, [*step.asked]
        self._output.turn = self._number
        self._rejected, self._rejected_turns = [*step.rejected], step.rejected_turns
        self._unmet = step.unmet
        self._budget = step.budget
        self.chat = self._next_chat()

    def run(self, *, piecemeal: bool = True) -> AsyncGenerator[Events]:
        """The events of all turns, as batches that became ready together. Not `piecemeal`, one delta tells what many
        would have: for those who are shown the outcome only."""
        for told in self._conversation.told.values():
            self._output.sources.update(told.sources)
            self._output.files.update(told.files)
        if self.compacting is not None and self.compacting.is_all:
            return self._compact(self.compacting)
        return self._answer(piecemeal=piecemeal)

    async def _answer(self, *, piecemeal: bool) -> AsyncGenerator[Events]:
        while True:
            async with aclosing(self._prepare()) as batches:
                async for events in batches:
                    yield events
            if self.compacting is not None:
                async with aclosing(self._compact(self.compacting)) as batches:
                    async for events in batches:
                        yield events
            demand = Demand(frozenset()) if self._is_last else self._toolbox.demand(self.chat.tool_choice)
            self._turn = turn = Turn(self._output, self._toolbox, demand)
            async with aclosing(self._inference.chat(self.chat)) as steps:
                async for step in steps:
                    turn.deltas += len(step)
                    if events := turn.feed(step if piecemeal else joined(step)):
                        yield events
            if turn.finish is None:
                raise UpstreamError("The inference server ended its answer without saying why.")
            self.usage = add_usage(self.usage, turn.finish.usage)
            if turn.hosted:
                async with aclosing(self._run_asked([*turn.hosted.values()])) as batches:
                    async for events in batches:
                        yield events
            if self._ended(turn, turn.finish):
                return
            self._number += 1
            self._output.turn = self._number
            self._note(self._number)
            self.chat = self._next_chat()

    async def _prepare(self) -> AsyncGenerator[Events]:
        """What tools do before the turn. `chat` is then what the model is to be asked."""
        waiting = [iter(tool.before(self._number)) for tool in self._toolbox.typed]
        ran = False
        while calls := [call for each in waiting if (call := next(each, None)) is not None]:
            ran = True
            self._unasked += calls
            for call in calls:
                self._output.place(call)
                yield call.open()
            for some in (
                self._run_all([call for call in calls if not call.counts]),
                self._run_asked([call for call in calls if call.counts]),
            ):
                async with aclosing(some) as batches:
                    async for events in batches:
                        yield events
        if ran:
            self._note(self._number)
            self._toolbox.refresh()
            self.chat = self._next_chat()

    async def _compact(self, compacting: Compacting) -> AsyncGenerator[Events]:
        """Make the chat shorter where it has grown too long."""
        async with aclosing(compacting.run(self.chat)) as batches:
            async for events in batches:
                yield events
        if compacting.spent is not None:
            self.usage = add_usage(self.usage, compacting.spent)
            if self._budget is not None:  # that is for what the client asked for
                self._budget += compacting.spent.output_tokens
            self._note(self._number)
            self.chat = self._next_chat()

    def break_off(self) -> Events:
        """The events that close what is open when the response ends before its end. What the model has used of a turn
        that has no finish nobody tells: each of its deltas counts as a token."""
        events: list[ResponseStreamEvent] = []
        if self._turn is not None:
            if self._turn.finish is None:
                self.usage = add_usage(self.usage, Usage(output_tokens=self._turn.deltas))
                self._turn.deltas = 0
            events += self._turn.break_off()
        events += self.compacting.break_off() if self.compacting is not None else ()
        for call in self._unasked:
            if self._output.items[call.index] is None:
                events += call.close("incomplete")
                self._output.items[call.index] = call.item("incomplete")
        return events

    async def _run_asked(self, calls: Sequence[HostedCall]) -> AsyncGenerator[Events]:
        """Run what the model asked for, as far as it may be run. It is told of all in the order of the calls."""
        refusals = self._refusals(calls)
        run = [call for call, why in zip(calls, refusals, strict=True) if not why]
        self._ran = len(run)
        self._calls_left -= len(run)
        self._asked = [*self._asked, *map(_what, calls)][-_MAX_REPEATS:]
        if self._turn is not None and self._turn.goes_on and self._left() != 0:
            self._running = calls
            self._note(self._number + 1)
        async with aclosing(self._run_all(run)) as batches:
            async for events in batches:
                yield events
        for call, why in zip(calls, refusals, strict=True):
            if why:
                events = call.fail(ToolFailed(f"Not run: {why}"))
                self._take(events)
                self._keep(call)
                yield events
        self._running = ()

    def _refusals(self, calls: Sequence[HostedCall]) -> Sequence[str]:
        """Why each may not be run; empty where it may."""
        asked, whys, ran = [*self._asked], list[str](), 0
        for call in calls:
            if self._turn is not None and asked[-_MAX_REPEATS:] == [_what(call)] * _MAX_REPEATS:
                whys.append(f"this very call was made {_MAX_REPEATS} times. Answer with what it gave.")
            elif ran >= self._calls_left:
                whys.append("no more tool calls are allowed in this response. Answer with what you have.")
            elif ran >= _MAX_CALLS_OF_A_TURN:
                whys.append(f"only {_MAX_CALLS_OF_A_TURN} tools can be called at a time.")
            else:
                whys.append("")
                ran += 1
            asked.append(_what(call))
        return whys

    async def _run_all(self, calls: Sequence[HostedCall]) -> AsyncGenerator[Events]:
        jobs = [partial(self._drive, call) for call in calls]
        async with aclosing(side_by_side(jobs, self._limits.parallel_calls)) as batches:
            async for events in batches:
                ended = self._take(events)
                yield events
                if ended and self._running:
                    self._note(self._number + 1)

    async def _drive(self, call: HostedCall, put: Put) -> None:
        """Run one call to its end, whatever becomes of it: a tool that fails is an outcome that the model is told."""
        limit_s = self._limits.tool_timeout_s
        done = False
        try:
            async with asyncio.timeout(limit_s), aclosing(call.run(self._output)) as batches:
                async for events in batches:
                    if not done and any(isinstance(event, ResponseOutputItemDoneEvent) for event in events):
                        done = True
                        self._keep(call)  # first: a step that is noted after these events must know
                    put(events)
            failure = ToolFailed("The tool ended without a result.")
        except StackError as exc:
            failure = exc if isinstance(exc, ToolFailed) else ToolFailed(exc.message)
        except TimeoutError:
            failure = ToolFailed(f"The tool took longer than {limit_s:g} s and was stopped.")
        except Exception:  # noqa: BLE001 - around a tool call: the model is told, though not the bug's own text
            _log.exception("the tool %s failed on a bug", call.name)
            failure = ToolFailed("The tool failed on an error of its own.")
        if not done:
            events = call.fail(failure)
            self._keep(call)
            put(events)

    def _keep(self, call: HostedCall) -> None:
        if call.told is not None:
            told = replace(call.told, output=self._output.bound(call.told.output), turn=self._number)
            self.told[call.id] = self._conversation.told[call.id] = told

    def _take(self, events: Events) -> bool:
        """Whether an item ended."""
        ended = [event for event in events if isinstance(event, ResponseOutputItemDoneEvent)]
        for event in ended:
            self._output.items[event.output_index] = event.item
        return bool(ended)

    def _note(self, turn: int) -> None:
        if self.on_step is None:
            return
        running = [call for call in self._running if self._output.items[call.index] is None]
        told = dict(islice(self.told.items(), self._noted, None))
        self._noted = len(self.told)
        self.on_step(
            Step(
                turn,
                self.usage,
                self._budget,
                told | {call.id: lost(call, self._number) for call in running},
                [call.index for call in running],
                self._calls_left,
                self._asked,
                self._rejected,
                self._rejected_turns,
                self._unmet,
            )
        )

    def _ended(self, turn: Turn, finish: Finish) -> bool:
        """Whether the response is at its end. Raises UpstreamError where the model will not do what is demanded."""
        self.told |= {call.id: call.told for call in turn.typed if call.told is not None}
        self.reason = _REASONS.get(finish.reason)
        if self.reason or turn.calls or turn.typed:
            return True
        self._unmet = self._unmet + 1 if turn.demand.forced and not turn.hosted else 0
        if self._unmet >= _MAX_ASKED:
            raise UpstreamError(turn.demand.failure())
        if not (turn.hosted or turn.rejected or self._unmet):
            return True
        position = len(self._output.items)
        self._rejected += [(position, replace(told, turn=self._number)) for told in turn.rejected]
        if turn.rejected or (turn.hosted and not self._ran):
            self._rejected_turns += 1
        if self._rejected_turns > _MAX_REJECTED_TURNS:  # it would go on like this for ever
            self.reason = None if turn.spoke else "max_messages"
            return True
        if self._left() == 0:
            self.reason = "max_output_tokens"
        return self.reason is not None

    def _left(self) -> int | None:
        """How many tokens the model may still generate; None where there is no limit."""
        return None if self._budget is None else max(0, self._budget - self.usage.output_tokens)

    @property
    def _is_last(self) -> bool:
        """Whether the model has made calls that cannot be made so often that it is given no tools any more."""
        return self._rejected_turns >= _MAX_REJECTED_TURNS

    def _next_chat(self) -> ChatRequest:
        """The chat of the turn that comes."""
        forced = self._number == 0 or self._unmet > 0
        tools = self._toolbox.offered(hosted=self._calls_left > 0 and (forced or not self._repeats()))
        if self._is_last:
            tools = []
        choice = self._toolbox.choice(failed=self._unlisted()) if forced else self._toolbox.later_choice(tools)
        messages = self._messages()
        if self._unmet and not (self._rejected and self._rejected[-1][1].turn == self._number - 1):
            # said by the user, because many models' templates take no system message here
            messages.append(Message(role="user", content=self._toolbox.demand(choice).reminder()))
        return self.chat.model_copy(
            update={
                "messages": messages,
                "tools": tools or None,
                "tool_choice": choice if tools else None,
                "parallel_tool_calls": self._toolbox.parallel if tools else None,
                "max_completion_tokens": self._left(),
            }
        )

    def _unlisted(self) -> Mapping[str, str]:
        """Why the tools of servers could not be listed, by label."""
        items = [item for item in self._output.items if isinstance(item, McpListTools)]
        return {item.server_label: item.error for item in items if item.error}

    def _messages(self) -> list[Message]:
        made: list[Item | Told] = [*ITEMS.validate_json(items_to_json(self._output.finished()))]
        for position, told in reversed(self._rejected):
            made.insert(position, told)
        return self._conversation.messages(made, grouped=self._toolbox.grouped)

    def _repeats(self) -> bool:
        """Whether the model has made one and the same call over and over."""
        last = self._asked[-_MAX_REPEATS:]
        return len(last) == _MAX_REPEATS and len(set(last)) == 1


def _what(call: HostedCall) -> tuple[str, str]:
    """Equal where one and the same call is made again."""
    return call.name, call.text
