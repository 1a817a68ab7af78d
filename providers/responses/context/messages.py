"""Responses items -> chat messages. Pure functions.

A model reads a conversation as messages: one assistant message holds the reasoning, the text and the calls of one
answer, and the output of each call follows it. Items are finer: they are grouped here, and refused where they do not
fit together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, cast, get_args

from apis.chat import (
    AudioData,
    AudioPart,
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
from apis.wire.item_parts import InputAudio, InputContentPart, InputFile, InputImage, InputText, OutputRefusal
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
    McpApprovalRequest,
    McpApprovalResponse,
    McpCallItem,
)
from providers.responses.context.replay import (
    find_generated_image,
    item_to_client_call,
    item_to_client_output,
    item_to_tool_result,
)
from providers.responses.events.ids import ModelTurn, turn_of
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.events.unvalidated import unvalidated
from providers.responses.tools.names import qualified_name

_build_message = unvalidated(Message)
_build_call, _build_called = unvalidated(FunctionCall), unvalidated(CalledFunction)
_ALL_NATIVE_TOOLS: Final = frozenset[NativeToolName](get_args(NativeToolName))
_RUNNING: Final = "The call runs. Go on without its output, which comes later."
_LATE_OUTPUT: Final = "[The output of the call {call}, which ran meanwhile.]"
_NO_ATTACHMENTS: Final[Mapping[InputFile | InputImage, ContentPart]] = {}


class ItemReader:
    """Reads the items of a conversation one by one, in order. It holds the finished messages, and the assistant message
    that items are being added to."""

    def __init__(
        self,
        tool_results: Mapping[str, ToolResultRecord],
        *,
        supports_namespaces: bool = False,
        attachments: Mapping[InputFile | InputImage, ContentPart] = _NO_ATTACHMENTS,
        sees_images: bool = False,
        compacted_items: Sequence[Item | ToolResultRecord] | None = None,
    ) -> None:
        """`tool_results` are the results of hosted calls, by item id; a ToolResultRecord among the items is a call
        without an item. `attachments` are the items' files, as the model reads them; with `sees_images` it also sees
        the images that image models generated. `compacted_items` are those that a compaction before the items replaces,
        as far as they are known; None without a compaction."""
        self._compacted_items = compacted_items
        self._compacted_calls: dict[str, str] | None = None
        """The names of the tools that the replaced calls without an output call, by call id, once they are needed."""
        self._tool_results = tool_results
        self._attachments = attachments
        self._supports_namespaces = supports_namespaces
        self._sees_images = sees_images
        self._messages: list[Message] = []
        self._deferred_messages: list[Message] = []
        self._unanswered_call_ids: dict[str, str] = {}
        """The names of the functions that they call, by call id."""
        self._unanswered_by_name: dict[str, dict[str, None]] = {}
        self._answered_call_ids: set[str] = set()
        self._client_call_ids: dict[str, str] = {}
        """The ids of the calls of clients' typed tools, by item id."""
        self._async_calls: dict[str, str] = {}
        """The names of the tools whose calls run while the model goes on, by the ids of those without an output."""
        self._late_calls: dict[str, str] = {}
        """Those of them that the model went on without."""
        self._call_ids_run_here: set[str] = set()
        """The ids of those whose results this server knows: outputs in items are left out."""
        self._approval_requests: dict[str, McpApprovalRequest] = {}
        self._begin_message()

    def _begin_message(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._phase: Phase | None = None
        self._calls: list[ChatToolCall] = []
        self._tool_messages: list[Message] = []
        self._turn: ModelTurn | None = None

    def read_all(self, items: Iterable[Item | ToolResultRecord]) -> list[Message]:
        """Return the messages of all items. Raises InvalidRequest where a call has no output or an output no call."""
        for item in items:
            self.read(item)
        return self.finish()

    def read(self, item: Item | ToolResultRecord) -> None:
        """Add the next item. Raises InvalidRequest for an output without its call."""
        read = self.READERS.get(type(item))  # a `match` asks pydantic for one type after the other
        if read is None:
            self._read_typed_item(cast("Item", item))
        else:
            read(self, item)

    def finish(self) -> list[Message]:
        """Return the messages. Raises InvalidRequest for a call without an output."""
        if self._async_calls:
            self._leave_async_calls()
        if self._unanswered_call_ids:
            missing = next(iter(self._unanswered_call_ids))
            raise InvalidRequest(f"No tool output found for function call {missing}.", param="input")
        self._end_message()
        return self._messages

    def _end_message(self) -> None:
        """Finish the assistant message; the results of its hosted calls follow it."""
        if self._reasoning or self._text or self._refusal or self._calls:
            self._messages.append(
                _build_message(
                    role="assistant",
                    content="".join(self._text) if self._text else None,
                    reasoning="\n".join(self._reasoning) or None,
                    refusal="".join(self._refusal) or None,
                    phase=self._phase,
                    tool_calls=self._calls or None,
                )
            )
            self._messages += self._tool_messages
            self._begin_message()

    def _read_message(self, item: InputMessage) -> None:
        if self._async_calls:
            self._leave_async_calls()
        self._add_message(_build_message(role=item.role, content=_content_to_chat(item.content, self._attachments)))

    def _add_message(self, message: Message) -> None:
        if self._unanswered_call_ids:
            # it was sent while a tool ran: no message may stand between a call and its output
            self._deferred_messages.append(message)
        else:
            self._end_message()
            self._messages.append(message)

    def _leave_async_calls(self) -> None:
        """Answer the calls that run while the model goes on, but for their outputs, which come later."""
        for call_id in [*self._async_calls]:
            self._late_calls[call_id] = self._async_calls[call_id]
            self._add_call_output(call_id, _RUNNING)

    def _leave_only_async_calls(self) -> None:
        """Answer them where no other call awaits its output, which has to follow the call."""
        if self._async_calls and self._unanswered_call_ids.keys() <= self._async_calls.keys():
            self._leave_async_calls()

    def _read_assistant_message(self, item: AssistantMessage) -> None:
        self._leave_only_async_calls()
        if (self._text or self._refusal or self._calls) and not self._awaits_output():
            self._end_message()
        self._phase = item.phase
        if isinstance(item.content, str):
            self._text.append(item.content)
            return
        for part in item.content:
            if isinstance(part, OutputRefusal):
                self._refusal.append(part.refusal)
            else:
                self._text.append(part.text)

    def _read_reasoning(self, item: ReasoningItem) -> None:
        self._leave_only_async_calls()
        if (self._reasoning or self._text or self._refusal or self._calls) and not self._awaits_output():
            self._end_message()  # each reasoning is a message by itself, as the model wrote it
        text = "".join(part.text for part in item.content or item.summary or ())
        if text:
            self._reasoning.append(text)

    def _read_call(self, item: FunctionCallItem | CustomToolCallItem) -> None:
        if item.status == "incomplete":
            return
        self._begin_turn(turn_of(item.id or ""))
        if isinstance(item, FunctionCallItem):
            name = qualified_name(item.namespace, item.name, supports_namespaces=self._supports_namespaces)
            self._add_call(_build_function_call(item.call_id, name, item.arguments))
        else:
            name = qualified_name(item.namespace, item.name, supports_namespaces=False)
            self._add_call(CustomCall(id=item.call_id, custom=CalledCustomTool(name=name, input=item.input)))
        if _is_async(item):
            self._async_calls[item.call_id] = name

    def _read_output(self, item: FunctionCallOutput | CustomToolCallOutput) -> None:
        call_id, content = self._find_call_id(item), _content_to_chat(item.output, self._attachments)
        if (name := self._take_compacted_call(call_id)) is not None:
            self._add_message(_late_output(call_id, name, content))
        else:
            self._add_call_output(call_id, content)

    def _take_compacted_call(self, call_id: str) -> str | None:
        """Return the name of the tool of a call that a compaction has replaced, once; "" where the client has left out
        the replaced items. None for any other call."""
        is_known = call_id in self._unanswered_call_ids or call_id in self._late_calls
        if self._compacted_items is None or is_known:
            return None
        if self._compacted_calls is None:
            self._compacted_calls = {
                item.call_id: qualified_name(item.namespace, item.name, supports_namespaces=self._supports_namespaces)
                for item in self._compacted_items
                if isinstance(item, FunctionCallItem | CustomToolCallItem)
            }
            self._answered_call_ids.update(
                item.call_id
                for item in self._compacted_items
                if isinstance(item, FunctionCallOutput | CustomToolCallOutput) and item.call_id is not None
            )
        if call_id in self._answered_call_ids:
            return None
        self._answered_call_ids.add(call_id)
        return self._compacted_calls.get(call_id, "")

    def _read_computer_output(self, item: ComputerCallOutput) -> None:
        self._add_call_output(item.call_id, _content_to_chat([item.output], self._attachments))

    def _read_result(self, result: ToolResultRecord) -> None:
        """Add a call without an item."""
        self._begin_turn(ModelTurn("", result.turn))
        self._add_tool_result(
            result if self._supports_namespaces else replace(result, name=result.name.replace(".", "__"))
        )

    def _read_approval_request(self, item: McpApprovalRequest) -> None:
        self._approval_requests[item.id] = item

    def _read_approval_response(self, item: McpApprovalResponse) -> None:
        request = self._approval_requests.get(item.approval_request_id)
        if request is not None and not item.approve:  # an approved call has an item of its own
            result = self._refused_call_result(request, item.reason)
            self._begin_turn(turn_of(request.id, result.turn))
            self._add_tool_result(result)

    def _read_typed_item(self, item: Item) -> None:
        """Add an item of a typed tool."""
        if (call := item_to_client_call(item)) is not None:
            self._client_call_ids[item.id or ""] = call.id
            result = self._tool_results.get(item.id or "")
            self._begin_turn(turn_of(item.id or "", result.turn if result else 0))
            if result is not None and result.output:  # this server ran it: the text is known word for word
                self._add_tool_result(result)
                self._call_ids_run_here.add(call.id)
                return
            function = CalledFunction(name=result.name, arguments=result.arguments) if result else call.function
            self._add_call(FunctionCall(id=call.id, function=function))
        elif (output := item_to_client_output(item, self._client_call_ids)) is not None:
            if output[0] not in self._call_ids_run_here:
                self._add_call_output(*output)
        else:
            self._read_hosted_call(item)

    def _read_hosted_call(self, item: Item) -> None:
        native_tools = _ALL_NATIVE_TOOLS if self._supports_namespaces else frozenset[NativeToolName]()
        result = self._tool_results.get(item.id or "") or item_to_tool_result(item, native_tools)
        if result is None:  # a client sent the item, and its result is not stored any more: no model reads it
            return
        turn = turn_of(item.id or "", result.turn) or ModelTurn("", result.turn)
        if isinstance(item, McpCallItem) and item.approval_request_id:
            turn = turn_of(item.approval_request_id)  # the model made the call when it asked for the approval
        self._begin_turn(turn)
        self._add_tool_result(result, find_generated_image(item) if self._sees_images else None)

    def _begin_turn(self, turn: ModelTurn | None) -> None:
        """End the assistant message where another turn than its own made the next call: the model had read the results
        of the earlier calls when it made this one."""
        if turn is None:
            return
        if turn.differs(self._turn):
            self._leave_only_async_calls()
            if self._tool_messages and not self._awaits_output():
                self._end_message()
        self._turn = turn

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

    def _add_call(self, call: ChatToolCall) -> None:
        self._calls.append(call)
        name = call.function.name if isinstance(call, FunctionCall) else ""
        former = self._unanswered_call_ids.get(call.id)
        if former is not None:  # two calls have this id
            self._unanswered_by_name[former].pop(call.id, None)
        self._unanswered_call_ids[call.id] = name
        self._unanswered_by_name.setdefault(name, {})[call.id] = None

    def _add_tool_result(self, tool_result: ToolResultRecord, image: ImagePart | None = None) -> None:
        if tool_result.custom:
            custom = CalledCustomTool(name=tool_result.name, input=tool_result.arguments)
            self._calls.append(CustomCall(id=tool_result.call_id, custom=custom))
        else:
            self._calls.append(_build_function_call(tool_result.call_id, tool_result.name, tool_result.arguments))
        content: str | list[ContentPart] = tool_result.output
        if image is not None:
            content = [TextPart(text=tool_result.output), image]
        self._tool_messages.append(_build_message(role="tool", tool_call_id=tool_result.call_id, content=content))

    def _add_call_output(self, call_id: str, content: str | list[ContentPart]) -> None:
        if call_id in self._late_calls and call_id not in self._async_calls:
            self._add_message(_late_output(call_id, self._late_calls.pop(call_id), content))
            return
        self._async_calls.pop(call_id, None)
        if call_id not in self._unanswered_call_ids:
            if call_id in self._answered_call_ids:
                message = f"The call with call_id {call_id} has an output already."
                raise InvalidRequest(message, param="input", code="invalid_value")
            raise InvalidRequest(f"No tool call found for function call output with call_id {call_id}.", param="input")
        name = self._unanswered_call_ids.pop(call_id)
        self._unanswered_by_name[name].pop(call_id, None)
        self._answered_call_ids.add(call_id)
        self._end_message()
        self._messages.append(_build_message(role="tool", tool_call_id=call_id, content=content))
        if not self._unanswered_call_ids:
            self._messages += self._deferred_messages
            self._deferred_messages = []

    def _find_call_id(self, output: FunctionCallOutput | CustomToolCallOutput) -> str:
        """Return the id of the call that an output belongs to: its own, or that of the oldest call without an output of
        the function that it names. Raises InvalidRequest."""
        call_id = output.call_id
        if call_id is not None:
            return call_id
        assert isinstance(output, FunctionCallOutput)  # only its `call_id` is optional
        name = qualified_name(output.namespace, output.name or "", supports_namespaces=self._supports_namespaces)
        for oldest in self._unanswered_by_name.get(name, ()):
            return oldest
        raise InvalidRequest(f"No tool call without an output found for the function '{name}'.", param="input")

    def _awaits_output(self) -> bool:
        """Return whether a call of the assistant message has no output yet: then further items join this message,
        because no message may stand between a call and its output."""
        return any(call.id in self._unanswered_call_ids for call in self._calls)

    def _skip(self, _: Item) -> None:
        """Read an item that no model sees."""

    def _refuse_reference(self, item: ItemReference) -> None:
        raise InvalidRequest(f"Item with id '{item.id}' not found.", param="input")

    READERS: Final[Mapping[type, Callable[..., None]]] = {
        InputMessage: _read_message,
        AssistantMessage: _read_assistant_message,
        ReasoningItem: _read_reasoning,
        FunctionCallItem: _read_call,
        CustomToolCallItem: _read_call,
        FunctionCallOutput: _read_output,
        CustomToolCallOutput: _read_output,
        ComputerCallOutput: _read_computer_output,
        ToolResultRecord: _read_result,
        McpApprovalRequest: _read_approval_request,
        McpApprovalResponse: _read_approval_response,
        AdditionalTools: _skip,
        ConfigurationUpdate: _skip,
        CompactionTrigger: _skip,
        ItemReference: _refuse_reference,
    }
    """The reader of each type; the others are of typed tools."""


def _is_async(item: FunctionCallItem | CustomToolCallItem) -> bool:
    """Return whether the model goes on without the output of the call. The SDK sends the items that it has parsed with
    its own name of the field."""
    fields = item.model_extra or {}
    return fields.get("async") is True or fields.get("async_") is True


def _late_output(call_id: str, name: str, content: str | list[ContentPart]) -> Message:
    """Return the output of a call that the model went on without. As the user, because an output can only follow its
    call."""
    head = _LATE_OUTPUT.format(call=f"{call_id} of {name}" if name else call_id)
    if isinstance(content, str):
        return _build_message(role="user", content=f"{head}\n{content}")
    return _build_message(role="user", content=[TextPart(text=head), *content])


def _build_function_call(call_id: str, name: str, arguments: str) -> FunctionCall:
    return _build_call(id=call_id, type="function", function=_build_called(name=name, arguments=arguments))


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
        case InputAudio(input_audio=audio):
            return AudioPart(input_audio=AudioData(data=audio.data, format=audio.format))
        case InputFile():
            file = FilePart(file=FileData(file_data=part.file_data, filename=part.filename))
            return attachments.get(part, file)
