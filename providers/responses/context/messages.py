"""Responses items -> chat messages. Pure functions.

A model reads a conversation as messages: one assistant message holds the reasoning, the text and the calls of one
answer, and the output of each call follows it. Items are finer: they are grouped here, and refused where they do not
fit together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, get_args

from apis.chat import (
    CalledCustomTool,
    CalledFunction,
    ChatToolCall,
    ContentPart,
    CustomCall,
    FileData,
    FilePart,
    FunctionCall,
    ImagePart,
    ImageUrl,
    Message,
    NativeToolName,
    TextPart,
)
from apis.errors import InvalidRequest
from apis.wire.base import Phase
from apis.wire.computer import ComputerCallOutput
from apis.wire.item_parts import InputContentPart, InputFile, InputImage, InputText, OutputRefusal
from apis.wire.items import (
    AssistantMessage,
    CompactionTrigger,
    ConfigurationUpdate,
    CustomToolCallItem,
    CustomToolCallOutput,
    FunctionCallItem,
    FunctionCallOutput,
    InputMessage,
    Item,
    ItemReference,
    ReasoningItem,
)
from apis.wire.tool_items import (
    AdditionalTools,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
)
from providers.responses.context.replay import (
    find_generated_image,
    item_to_client_call,
    item_to_client_output,
    item_to_tool_result,
)
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.events.unvalidated import unvalidated
from providers.responses.tools.names import qualified_name

_build_message = unvalidated(Message)
_ALL_NATIVE_TOOLS: Final = frozenset[NativeToolName](get_args(NativeToolName))
_TYPES_WITH_CONTENT: Final = frozenset({InputMessage, FunctionCallOutput, CustomToolCallOutput, ComputerCallOutput})
_TYPES_WITH_ANOTHERS_ID: Final = frozenset({ItemReference, LocalShellCallOutput})
_NO_ATTACHMENTS: Final[Mapping[InputFile | InputImage, ContentPart]] = {}


def check_items(items: Sequence[Item], field: str = "input") -> None:
    """Raise InvalidRequest, naming the index in `field`, for a repeated id, a misplaced trigger or a wrong part."""
    seen_ids: set[str] = set()
    for index, item in enumerate(items):
        kind = type(item)  # for 25,000 items: an isinstance that is false costs pydantic a microsecond
        if kind in _TYPES_WITH_ANOTHERS_ID:
            continue
        if kind is CompactionTrigger:
            if field != "input" or index != len(items) - 1:
                message = "The 'compaction_trigger' item must be the final input item of a response."
                raise InvalidRequest(message, param=f"{field}[{index}]", code="invalid_value")
            continue
        if item.id is not None and item.id in seen_ids:
            raise InvalidRequest(f"Duplicate item id '{item.id}'.", param=f"{field}[{index}].id", code="invalid_value")
        if item.id is not None:
            seen_ids.add(item.id)
        if kind in _TYPES_WITH_CONTENT:
            _check_content(item, f"{field}[{index}]")


def _check_content(item: Item, location: str) -> None:
    match item:
        case InputMessage(content=str()):
            pass
        case InputMessage(content=list() as parts):
            _check_parts(parts, f"{location}.content")
        case FunctionCallOutput(call_id=None, name=None):
            param = f"{location}.call_id"
            message = f"Missing required parameter: '{param}'. Send it, or the 'name' of the function."
            raise InvalidRequest(message, param=param, code="missing_required_parameter")
        case FunctionCallOutput(output=list() as parts) | CustomToolCallOutput(output=list() as parts):
            _check_parts(parts, f"{location}.output")
        case ComputerCallOutput(output=screenshot):
            _check_part(screenshot, f"{location}.output")
        case _:
            pass


def items_to_messages(
    items: Iterable[Item | ToolResultRecord],
    tool_results: Mapping[str, ToolResultRecord],
    *,
    supports_namespaces: bool = False,
    attachments: Mapping[InputFile | InputImage, ContentPart] = _NO_ATTACHMENTS,
    sees_images: bool = False,
) -> list[Message]:
    """Return the messages of a conversation. `tool_results` are the results of hosted calls, by item id; a
    ToolResultRecord among the items is a call without an item. `attachments` are the items' files, as the model reads
    them; with `sees_images` it also sees the images that image models generated.

    Raises InvalidRequest where a call has no output or an output no call.
    """
    reader = ItemReader(
        tool_results, supports_namespaces=supports_namespaces, attachments=attachments, sees_images=sees_images
    )
    for item in items:
        reader.read(item)
    return reader.finish()


class ItemReader:
    """Reads the items of a conversation one by one, in order; the arguments are those of `items_to_messages`."""

    def __init__(
        self,
        tool_results: Mapping[str, ToolResultRecord],
        *,
        supports_namespaces: bool = False,
        attachments: Mapping[InputFile | InputImage, ContentPart] = _NO_ATTACHMENTS,
        sees_images: bool = False,
    ) -> None:
        self._builder = _MessageBuilder()
        self._attachments = attachments
        self._supports_namespaces = supports_namespaces
        self._typed_items = _TypedItemReader(
            self._builder, tool_results, supports_namespaces=supports_namespaces, sees_images=sees_images
        )

    def read(self, item: Item | ToolResultRecord) -> None:
        """Add the next item. Raises InvalidRequest for an output without its call."""
        builder, attachments, supports_namespaces = self._builder, self._attachments, self._supports_namespaces
        match item:
            case ToolResultRecord():
                builder.add_tool_result(
                    item if supports_namespaces else replace(item, name=item.name.replace(".", "__"))
                )
            case InputMessage(role=role, content=content):
                builder.add_message(_build_message(role=role, content=_content_to_chat(content, attachments)))
            case AssistantMessage():
                builder.add_assistant_message(item)
            case ReasoningItem():
                builder.add_reasoning(item)
            case FunctionCallItem() | CustomToolCallItem():
                if item.status != "incomplete":
                    builder.add_call(_item_to_call(item, supports_namespaces=supports_namespaces))
            case FunctionCallOutput() | CustomToolCallOutput():
                call_id = builder.find_call_id(item, supports_namespaces=supports_namespaces)
                builder.add_call_output(call_id, _content_to_chat(item.output, attachments))
            case ComputerCallOutput(call_id=call_id, output=screenshot):
                builder.add_call_output(call_id, _content_to_chat([screenshot], attachments))
            case AdditionalTools() | ConfigurationUpdate() | CompactionTrigger():
                pass
            case ItemReference():
                raise InvalidRequest(f"Item with id '{item.id}' not found.", param="input")
            case _:
                self._typed_items.read_item(item)

    def finish(self) -> list[Message]:
        """Return the messages. Raises InvalidRequest for a call without an output."""
        return self._builder.finish()


def _item_to_call(item: FunctionCallItem | CustomToolCallItem, *, supports_namespaces: bool) -> ChatToolCall:
    if isinstance(item, FunctionCallItem):
        name = qualified_name(item.namespace, item.name, supports_namespaces=supports_namespaces)
        return FunctionCall(id=item.call_id, function=CalledFunction(name=name, arguments=item.arguments))
    name = qualified_name(item.namespace, item.name, supports_namespaces=False)
    return CustomCall(id=item.call_id, custom=CalledCustomTool(name=name, input=item.input))


class _TypedItemReader:
    """Adds the items of typed tools to the messages."""

    def __init__(
        self,
        builder: "_MessageBuilder",
        tool_results: Mapping[str, ToolResultRecord],
        *,
        supports_namespaces: bool,
        sees_images: bool,
    ) -> None:
        self._sees_images = sees_images
        self._builder = builder
        self._tool_results = tool_results
        self._supports_namespaces = supports_namespaces
        self._call_ids: dict[str, str] = {}
        self._answered_call_ids: set[str] = set()
        self._approval_requests: dict[str, McpApprovalRequest] = {}

    def read_item(self, item: Item) -> None:
        if isinstance(item, McpApprovalRequest):
            self._approval_requests[item.id] = item
        elif isinstance(item, McpApprovalResponse):
            request = self._approval_requests.get(item.approval_request_id)
            if request is not None and not item.approve:  # an approved call has an item of its own
                self._builder.add_tool_result(self._refused_call_result(request, item.reason))
        elif (call := item_to_client_call(item)) is not None:
            self._call_ids[item.id or ""] = call.id
            result = self._tool_results.get(item.id or "")
            if result is not None and result.output:  # this server ran it: the text is known word for word
                self._builder.add_tool_result(result)
                self._answered_call_ids.add(call.id)
                return
            function = CalledFunction(name=result.name, arguments=result.arguments) if result else call.function
            self._builder.add_call(FunctionCall(id=call.id, function=function))
        elif (output := item_to_client_output(item, self._call_ids)) is not None:
            if output[0] not in self._answered_call_ids:
                self._builder.add_call_output(*output)
        else:
            self._builder.add_tool_result(
                self._tool_results.get(item.id or "")
                or item_to_tool_result(item, _ALL_NATIVE_TOOLS if self._supports_namespaces else frozenset()),
                find_generated_image(item) if self._sees_images else None,
            )

    def _refused_call_result(self, request: McpApprovalRequest, reason: str | None) -> ToolResultRecord:
        result = self._tool_results.get(request.id)
        name = (
            result.name
            if result
            else qualified_name(request.server_label, request.name, supports_namespaces=self._supports_namespaces)
        )
        call_id = result.call_id if result else request.id
        words = f" They said: {reason}" if reason else ""
        return ToolResultRecord(
            call_id, name, request.arguments, f"Not run: the user did not approve this call.{words}"
        )


class _MessageBuilder:
    """Finished messages, and the assistant message that items are being added to."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._unanswered_call_ids: dict[str, str] = {}
        """The names of the functions that they call, by call id."""
        self._unanswered_by_name: dict[str, dict[str, None]] = {}
        self._answered_call_ids: set[str] = set()
        self._deferred_messages: list[Message] = []
        self._reset()

    def _reset(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._phase: Phase | None = None
        self._calls: list[ChatToolCall] = []
        self._tool_messages: list[Message] = []
        self._turn = 0

    def flush(self) -> None:
        """Finish the assistant message; the results of its hosted calls follow it."""
        if self._reasoning or self._text or self._refusal or self._calls:
            self.messages.append(
                _build_message(
                    role="assistant",
                    content="".join(self._text) if self._text else None,
                    reasoning="\n".join(self._reasoning) or None,
                    refusal="".join(self._refusal) or None,
                    phase=self._phase,
                    tool_calls=self._calls or None,
                )
            )
            self.messages += self._tool_messages
            self._reset()

    def add_message(self, message: Message) -> None:
        if self._unanswered_call_ids:
            # it was sent while a tool ran: no message may stand between a call and its output
            self._deferred_messages.append(message)
        else:
            self.flush()
            self.messages.append(message)

    def add_assistant_message(self, item: AssistantMessage) -> None:
        if not self._awaits_output() and (self._text or self._refusal or self._calls):
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

    def add_reasoning(self, item: ReasoningItem) -> None:
        if not self._awaits_output() and (self._reasoning or self._text or self._refusal or self._calls):
            self.flush()  # each reasoning is a message by itself, as the model wrote it
        parts = item.content or item.summary or ()
        text = "".join(part.text for part in parts)
        if text:
            self._reasoning.append(text)

    def add_call(self, call: ChatToolCall) -> None:
        self._calls.append(call)
        name = call.function.name if isinstance(call, FunctionCall) else ""
        former = self._unanswered_call_ids.get(call.id)
        if former is not None:  # two calls have this id
            self._unanswered_by_name[former].pop(call.id, None)
        self._unanswered_call_ids[call.id] = name
        self._unanswered_by_name.setdefault(name, {})[call.id] = None

    def add_tool_result(self, tool_result: ToolResultRecord | None, image: ImagePart | None = None) -> None:
        if tool_result is None:  # a client sent the item, and its result is not stored any more: no model reads it
            return
        if self._tool_messages and tool_result.turn != self._turn and not self._awaits_output():
            self.flush()  # the model had read the earlier results when it made this call
        self._turn = tool_result.turn
        if tool_result.custom:
            custom = CalledCustomTool(name=tool_result.name, input=tool_result.arguments)
            self._calls.append(CustomCall(id=tool_result.call_id, custom=custom))
        else:
            function = CalledFunction(name=tool_result.name, arguments=tool_result.arguments)
            self._calls.append(FunctionCall(id=tool_result.call_id, function=function))
        content: str | list[ContentPart] = tool_result.output
        if image is not None:
            content = [TextPart(text=tool_result.output), image]
        self._tool_messages.append(_build_message(role="tool", tool_call_id=tool_result.call_id, content=content))

    def add_call_output(self, call_id: str, content: str | list[ContentPart]) -> None:
        if call_id not in self._unanswered_call_ids:
            if call_id in self._answered_call_ids:
                message = f"The call with call_id {call_id} has an output already."
                raise InvalidRequest(message, param="input", code="invalid_value")
            raise InvalidRequest(f"No tool call found for function call output with call_id {call_id}.", param="input")
        name = self._unanswered_call_ids.pop(call_id)
        self._unanswered_by_name[name].pop(call_id, None)
        self._answered_call_ids.add(call_id)
        self.flush()
        self.messages.append(_build_message(role="tool", tool_call_id=call_id, content=content))
        if not self._unanswered_call_ids:
            self.messages += self._deferred_messages
            self._deferred_messages = []

    def find_call_id(self, output: FunctionCallOutput | CustomToolCallOutput, *, supports_namespaces: bool) -> str:
        """Return the id of the call that an output belongs to: its own, or that of the oldest call without an output of
        the function that it names. Raises InvalidRequest."""
        call_id = output.call_id
        if call_id is not None:
            return call_id
        assert isinstance(output, FunctionCallOutput)  # only its `call_id` is optional
        name = qualified_name(output.namespace, output.name or "", supports_namespaces=supports_namespaces)
        for oldest in self._unanswered_by_name.get(name, ()):
            return oldest
        raise InvalidRequest(f"No tool call without an output found for the function '{name}'.", param="input")

    def finish(self) -> list[Message]:
        if self._unanswered_call_ids:
            missing = next(iter(self._unanswered_call_ids))
            raise InvalidRequest(f"No tool output found for function call {missing}.", param="input")
        self.flush()
        return self.messages

    def _awaits_output(self) -> bool:
        """Return whether a call of the assistant message has no output yet: then further items join this message,
        because no message may stand between a call and its output."""
        return any(call.id in self._unanswered_call_ids for call in self._calls)


def _content_to_chat(
    content: str | Sequence[InputContentPart], attachments: Mapping[InputFile | InputImage, ContentPart]
) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if len(content) == 1 and isinstance(content[0], InputText):
        return content[0].text
    return [_part_to_chat(part, attachments) for part in content]


def _part_to_chat(part: InputContentPart, attachments: Mapping[InputFile | InputImage, ContentPart]) -> ContentPart:
    match part:
        case InputText(text=text):
            return TextPart(text=text)
        case InputImage():
            image = ImagePart(image_url=ImageUrl(url=part.image_url or "", detail=part.detail))
            return attachments.get(part, image)
        case InputFile():
            file = FilePart(file=FileData(file_data=part.file_data, filename=part.filename))
            return attachments.get(part, file)


def _check_parts(parts: Sequence[InputContentPart], param: str) -> None:
    for index, part in enumerate(parts):
        _check_part(part, f"{param}[{index}]")


def _check_part(part: InputContentPart, location: str) -> None:
    if isinstance(part, InputText):
        return
    if isinstance(part, InputFile):
        _check_one_of(part, ("file_data", "file_id", "file_url"), location)
        return
    _check_one_of(part, ("image_url", "file_id"), location)
    if part.image_url:
        _check_image_url(part.image_url, location)


def _check_one_of(part: InputFile | InputImage, fields: Sequence[str], param: str) -> None:
    present = [name for name in fields if getattr(part, name)]
    if not present:
        listed = ", ".join(f"`{name}`" for name in fields[:-1])
        message = f"The part needs {listed} or `{fields[-1]}`."
        raise InvalidRequest(message, param=f"{param}.{fields[0]}", code="missing_required_parameter")
    if len(present) > 1:
        message = f"The part has both `{present[0]}` and `{present[1]}`: give one of them."
        raise InvalidRequest(message, param=f"{param}.{present[1]}", code="mutually_exclusive_parameters")


def _check_image_url(url: str, param: str) -> None:
    if url.startswith(("https://", "http://")):
        return
    head, comma, _ = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        message = "An image URL is https, or data:image/TYPE;base64,DATA."
        raise InvalidRequest(message, param=f"{param}.image_url", code="invalid_image_url")
