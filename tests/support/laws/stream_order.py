"""The order of events in a response's stream: the tables that the laws are checked by."""

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import BaseModel

Json = dict[str, Any]


def _by_type(union: Any) -> dict[str, type[BaseModel]]:
    return {get_args(cls.model_fields["type"].annotation)[0]: cls for cls in get_args(get_args(union)[0])}


EVENTS: Final = _by_type(ResponseStreamEvent)
ITEMS: Final = _by_type(ResponseOutputItem)


def _paths(*paths: str) -> dict[str, set[str]]:
    """Return the followers of each name on the paths. `a*` is any number of a, none included; `a|b` is one of them."""
    follow: dict[str, set[str]] = {}
    for path in paths:
        before: set[str] = set()
        for step in path.split():
            names = set(step.rstrip("*").split("|"))
            repeats = step.endswith("*")
            for name in before | names if repeats else before:
                follow.setdefault(name, set()).update(names)
            before = before | names if repeats else names
    return follow


def _stages(kind: str, stages: str) -> dict[str, set[str]]:
    """From added to done by way of `stages`: for a kind k `searching` is k.searching, `_input.done` is k_input.done."""
    names = re.sub(r"[a-z_.*]+", lambda stage: f"{kind}{'' if stage[0][0] == '_' else '.'}{stage[0]}", stages)
    return _paths(f"output_item.added {names} output_item.done")


ORDER: Final[Mapping[str, Mapping[str, set[str]]]] = {
    "message": _paths(
        "output_item.added content_part.added output_text.delta* output_text.done content_part.done output_item.done",
        "content_part.added refusal.delta* refusal.done content_part.done",
        "output_text.delta output_text.annotation.added* output_text.delta|output_text.done",
        "content_part.done content_part.added",
    ),
    "reasoning": _paths(
        "output_item.added output_item.done",
        "output_item.added content_part.added reasoning_text.delta* reasoning_text.done content_part.done",
        "content_part.done content_part.added|reasoning_summary_part.added|output_item.done",
        "output_item.added reasoning_summary_part.added reasoning_summary_text.delta* reasoning_summary_text.done",
        "reasoning_summary_text.done reasoning_summary_part.done reasoning_summary_part.added|output_item.done",
    ),
    "function_call": _stages("function_call", "_arguments.delta* _arguments.done"),
    "custom_tool_call": _stages("custom_tool_call", "_input.delta* _input.done"),
    "web_search_call": _stages("web_search_call", "in_progress searching completed"),
    "file_search_call": _stages("file_search_call", "in_progress searching completed"),
    "code_interpreter_call": _stages(
        "code_interpreter_call", "in_progress _code.delta* _code.done interpreting completed"
    ),
    "image_generation_call": _stages("image_generation_call", "in_progress generating partial_image* completed"),
    "shell_call": _paths(
        "output_item.added shell_call_command.added shell_call_command.delta* shell_call_command.done output_item.done",
        "output_item.added output_item.done",
        "shell_call_command.done shell_call_command.added",
    ),
    "shell_call_output": _paths(
        "output_item.added shell_call_output_content.delta* shell_call_output_content.done output_item.done",
        "output_item.added output_item.done",
        "shell_call_output_content.done shell_call_output_content.delta|shell_call_output_content.done",
    ),
    "mcp_list_tools": _stages("mcp_list_tools", "in_progress completed|failed"),
    "compaction": _stages("compaction", "compacting"),
    "mcp_call": _stages("mcp_call", "in_progress _arguments.delta* _arguments.done completed|failed"),
}
SIMPLE: Final = _paths("output_item.added output_item.done")
ORDER_LAW: Final = {"message": 5, "reasoning": 7, "function_call": 8, "custom_tool_call": 8}

EMPTY: Final[Mapping[str, Json]] = {
    "message": {"content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
    "code_interpreter_call": {"code": ""},
    "mcp_call": {"arguments": ""},
    "mcp_list_tools": {"tools": []},
    "shell_call_output": {"output": []},
}
"""Streamable fields of each kind, as they are when the item is added."""

NO_STATUS: Final = {"custom_tool_call", "mcp_list_tools", "mcp_approval_request", "compaction"}
"""Kinds whose items the API defines without a status. They may have one all the same."""

WITHOUT_FAILED: Final = {"shell_call", "shell_call_output"}
"""Kinds that are incomplete where others are failed: the API has no such status for them."""

LASTING: Final = ("id", "type", "call_id", "name", "role", "server_label")
"""The fields that an item has from its first event on and keeps."""

TEXTS: Final[Mapping[str, str]] = {
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "reasoning_summary_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
    "code_interpreter_call_code": "code",
    "mcp_call_arguments": "arguments",
}
"""Streamed texts -> the field that holds the whole text, in the done event and in the part or item."""

PARTS: Final = {"content_part": ("content_index", "content"), "reasoning_summary_part": ("summary_index", "summary")}
PART_OF_TEXT: Final = {"reasoning_summary_text": "summary_text"}

BEGINNING: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("response.created",),
    "response.created": ("response.queued", "response.in_progress"),
    "response.queued": ("response.in_progress", "response.failed"),
}
"""The events that may follow each until the response is in progress; a queued one may fail without being so."""
TERMINAL: Final = {"response.completed", "response.incomplete", "response.failed"}
STATUS: Final = {
    "response.created": {"queued", "in_progress"},
    "response.queued": {"queued"},
    **{name: {name.removeprefix("response.")} for name in (*TERMINAL, "response.in_progress")},
}
RESPONSE_FIELDS: Final = """
    id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key
"""
CONSTANT: Final = ("id", "object", "created_at", "model", "previous_response_id", "instructions", "tools", "metadata")
