"""Responses items <-> chat messages. Pure functions.

A model sees a conversation as messages: one assistant message holds the thought, the text and the calls of one answer,
and each call's answer follows it. Items are finer: this file groups them, and refuses what cannot be grouped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, get_args

from apis.chat import (
    Call,
    CalledCustom,
    CalledFunction,
    CustomCall,
    FileData,
    FilePart,
    FunctionCall,
    ImagePart,
    ImageUrl,
    Message,
    Native,
    Part,
    TextPart,
)
from apis.errors import InvalidRequest
from apis.wire.base import Phase
from apis.wire.item_parts import GivenContent, InputFile, InputImage, InputText, OutputRefusal
from apis.wire.items import (
    AssistantMessage,
    CompactionTrigger,
    ConfigurationUpdate,
    CustomToolCallItem,
    CustomToolCallOutput,
    FunctionCallItem,
    FunctionCallOutput,
    GivenMessage,
    Item,
    ItemReference,
    ReasoningItem,
)
from apis.wire.tool_items import AdditionalTools, LocalShellCallOutput, McpApprovalRequest, McpApprovalResponse
from providers.responses.context.replay import client_call, client_output, hosted_call
from providers.responses.events.tool_result import Told
from providers.responses.tools.names import called_name

_OWN: Final = frozenset[Native](get_args(Native))
_NOTHING: Final[Mapping[InputFile | InputImage, Part]] = {}


def check_items(items: Sequence[Item], field: str = "input") -> None:
    """Refuse, by index, what is legal in the API and not offered here, and ids that come twice. `field`
    is where the request has them."""
    seen: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, ItemReference | LocalShellCallOutput):  # its id is that of its call
            continue
        if isinstance(item, CompactionTrigger):
            if field != "input" or index != len(items) - 1:
                message = "The 'compaction_trigger' item must be the final input item of a response."
                raise InvalidRequest(message, param=f"{field}[{index}]", code="invalid_value")
            continue
        if item.id is not None and item.id in seen:
            raise InvalidRequest(f"Duplicate item id '{item.id}'.", param=f"{field}[{index}].id", code="invalid_value")
        if item.id is not None:
            seen.add(item.id)
        match item:
            case GivenMessage(content=list() as parts):
                _check_parts(parts, f"{field}[{index}].content")
            case FunctionCallOutput(output=list() as parts) | CustomToolCallOutput(output=list() as parts):
                _check_parts(parts, f"{field}[{index}].output")
            case _:
                pass


def items_to_messages(
    items: Iterable[Item | Told],
    told: Mapping[str, Told],
    *,
    grouped: bool = False,
    attached: Mapping[InputFile | InputImage, Part] = _NOTHING,
) -> list[Message]:
    """The conversation as a model sees it. `told` holds, by item id, what hosted calls gave; one among the items is a
    call that has no item. `grouped` is for models that know namespaces. `attached` are the items' files, read.

    Raises InvalidRequest where a call has no output or an output no call.
    """
    grouping = _Grouping()
    typed = _Typed(grouping, told, grouped=grouped)
    for item in items:
        match item:
            case Told():
                grouping.hosted(item if grouped else replace(item, name=item.name.replace(".", "__")))
            case GivenMessage(role=role, content=content):
                grouping.give(Message(role=role, content=_content(content, attached)))
            case AssistantMessage():
                grouping.say(item)
            case ReasoningItem():
                grouping.think(item)
            case FunctionCallItem() | CustomToolCallItem():
                if item.status != "incomplete":
                    grouping.call(_call(item, grouped=grouped))
            case FunctionCallOutput() | CustomToolCallOutput():
                grouping.answer(item.call_id, _content(item.output, attached))
            case AdditionalTools() | ConfigurationUpdate() | CompactionTrigger():
                pass
            case ItemReference():
                raise InvalidRequest(f"Item with id '{item.id}' not found.", param="input")
            case _:
                typed.take(item)
    return grouping.finish()


def _call(item: FunctionCallItem | CustomToolCallItem, *, grouped: bool) -> Call:
    if isinstance(item, FunctionCallItem):
        name = called_name(item.namespace, item.name, grouped=grouped)
        return FunctionCall(id=item.call_id, function=CalledFunction(name=name, arguments=item.arguments))
    name = called_name(item.namespace, item.name, grouped=False)
    return CustomCall(id=item.call_id, custom=CalledCustom(name=name, input=item.input))


class _Typed:
    """Reads the items of typed tools into a grouping."""

    def __init__(self, grouping: "_Grouping", told: Mapping[str, Told], *, grouped: bool) -> None:
        self._grouping = grouping
        self._told = told
        self._grouped = grouped
        self._calls: dict[str, str] = {}
        self._asked: dict[str, McpApprovalRequest] = {}

    def take(self, item: Item) -> None:
        if isinstance(item, McpApprovalRequest):
            self._asked[item.id] = item
        elif isinstance(item, McpApprovalResponse):
            request = self._asked.get(item.approval_request_id)
            if request is not None and not item.approve:  # one that was approved is told by its call
                self._grouping.hosted(self._refused(request, item.reason))
        elif (call := client_call(item)) is not None:
            self._calls[item.id or ""] = call.id
            written = self._told.get(item.id or "")
            function = CalledFunction(name=written.name, arguments=written.arguments) if written else call.function
            self._grouping.call(FunctionCall(id=call.id, function=function))
        elif (output := client_output(item, self._calls)) is not None:
            self._grouping.answer(*output)
        else:
            self._grouping.hosted(
                self._told.get(item.id or "") or hosted_call(item, _OWN if self._grouped else frozenset())
            )

    def _refused(self, request: McpApprovalRequest, reason: str | None) -> Told:
        before = self._told.get(request.id)
        name = before.name if before else called_name(request.server_label, request.name, grouped=self._grouped)
        identity = before.call_id if before else request.id
        why = f" They said: {reason}" if reason else ""
        return Told(identity, name, request.arguments, f"Not run: the user did not approve this call.{why}")


class _Grouping:
    """The messages so far, and the assistant message being gathered."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._unanswered: dict[str, None] = {}
        self._later: list[Message] = []
        self._reset()

    def _reset(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._phase: Phase | None = None
        self._calls: list[Call] = []
        self._told: list[Message] = []
        self._turn = 0

    def flush(self) -> None:
        """End the assistant message being gathered; what hosted tools told follows it."""
        if self._reasoning or self._text or self._refusal or self._calls:
            self.messages.append(
                Message(
                    role="assistant",
                    content="".join(self._text) if self._text else None,
                    reasoning="\n".join(self._reasoning) or None,
                    refusal="".join(self._refusal) or None,
                    phase=self._phase,
                    tool_calls=self._calls or None,
                )
            )
            self.messages += self._told
            self._reset()

    def give(self, message: Message) -> None:
        if self._unanswered:
            self._later.append(message)  # said while a tool ran: nothing may come between a call and its answer
        else:
            self.flush()
            self.messages.append(message)

    def say(self, item: AssistantMessage) -> None:
        if not self._waits() and (self._text or self._refusal or self._calls):
            self.flush()
        self._phase = item.phase
        if isinstance(item.content, str):
            self._text.append(item.content)
            return
        for part in item.content:
            if isinstance(part, OutputRefusal):
                self._refusal.append(part.refusal)
            else:
                self._text.append(part.text)

    def think(self, item: ReasoningItem) -> None:
        if not self._waits() and (self._text or self._refusal or self._calls):
            self.flush()
        parts = item.content or item.summary or ()
        thought = "".join(part.text for part in parts)
        if thought:
            self._reasoning.append(thought)

    def call(self, call: Call) -> None:
        self._calls.append(call)
        self._unanswered[call.id] = None

    def hosted(self, told: Told | None) -> None:
        # without what it told, the call says nothing to a model: a client sent it along, and the store has it no more
        if told is None:
            return
        if self._told and told.turn != self._turn and not self._waits():
            self.flush()  # the model had been told of those before when it made this one
        self._turn = told.turn
        if told.custom:
            custom = CalledCustom(name=told.name, input=told.arguments)
            self._calls.append(CustomCall(id=told.call_id, custom=custom))
        else:
            function = CalledFunction(name=told.name, arguments=told.arguments)
            self._calls.append(FunctionCall(id=told.call_id, function=function))
        self._told.append(Message(role="tool", tool_call_id=told.call_id, content=told.output))

    def answer(self, call_id: str, content: str | list[Part]) -> None:
        if call_id not in self._unanswered:
            raise InvalidRequest(f"No tool call found for function call output with call_id {call_id}.", param="input")
        del self._unanswered[call_id]
        self.flush()
        self.messages.append(Message(role="tool", tool_call_id=call_id, content=content))
        if not self._unanswered:
            self.messages += self._later
            self._later = []

    def finish(self) -> list[Message]:
        if self._unanswered:
            missing = next(iter(self._unanswered))
            raise InvalidRequest(f"No tool output found for function call {missing}.", param="input")
        self.flush()
        return self.messages

    def _waits(self) -> bool:
        """Whether a call of the message being gathered still wants its answer: then more joins the same message,
        because nothing may come between a call and its answer."""
        return any(call.id in self._unanswered for call in self._calls)


def _content(
    content: str | Sequence[GivenContent], attached: Mapping[InputFile | InputImage, Part]
) -> str | list[Part]:
    if isinstance(content, str):
        return content
    if len(content) == 1 and isinstance(content[0], InputText):
        return content[0].text
    return [_part(part, attached) for part in content]


def _part(part: GivenContent, attached: Mapping[InputFile | InputImage, Part]) -> Part:
    match part:
        case InputText(text=text):
            return TextPart(text=text)
        case InputImage():
            image = ImagePart(image_url=ImageUrl(url=part.image_url or "", detail=part.detail))
            return attached.get(part, image)
        case InputFile():
            file = FilePart(file=FileData(file_data=part.file_data, filename=part.filename))
            return attached.get(part, file)


def _check_parts(parts: Sequence[GivenContent], path: str) -> None:
    for index, part in enumerate(parts):
        where = f"{path}[{index}]"
        if isinstance(part, InputText):
            continue
        if isinstance(part, InputFile):
            _check_one_of(part, ("file_data", "file_id", "file_url"), where)
            continue
        _check_one_of(part, ("image_url", "file_id"), where)
        if part.image_url:
            _check_image_url(part.image_url, where)


def _check_one_of(part: InputFile | InputImage, fields: Sequence[str], where: str) -> None:
    given = [name for name in fields if getattr(part, name)]
    if not given:
        listed = ", ".join(f"`{name}`" for name in fields[:-1])
        message = f"The part needs {listed} or `{fields[-1]}`."
        raise InvalidRequest(message, param=f"{where}.{fields[0]}", code="missing_required_parameter")
    if len(given) > 1:
        message = f"The part has both `{given[0]}` and `{given[1]}`: give one of them."
        raise InvalidRequest(message, param=f"{where}.{given[1]}", code="mutually_exclusive_parameters")


def _check_image_url(url: str, where: str) -> None:
    if url.startswith(("https://", "http://")):
        return
    head, comma, _ = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        message = "An image URL is https, or data:image/TYPE;base64,DATA."
        raise InvalidRequest(message, param=f"{where}.image_url", code="invalid_image_url")
