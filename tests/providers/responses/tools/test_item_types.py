"""The table of item types against the items of requests, the registry of tools, and the rest of the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from openai.types.responses import ResponseOutputItem

from apis.wire.item_types import HOSTED_CALL_TYPES, ITEM_TYPES
from apis.wire.items import Item
from providers.responses.tools.call import ToolFunctions
from providers.responses.tools.registry import TOOL_TYPES, TYPES_BY_CALL_ITEM
from tests.support.laws.source_trees import ROOT, files_with, nodes, python_files, shared_trees

__all__ = ["shared_trees"]

COMMON: Final = {
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("additional_tools", "configuration_update", "compaction", "compaction_trigger", "item_reference"),
}
"""Types of the items that belong to no tool of the server's registry."""
TOOLS_AND_WIRE: Final = ("apis/wire/", "providers/responses/tools/")
NAME_A_TOOLS_ITEM: Final = {
    # pictures among the items: screenshots and generated images
    "providers/responses/context/attachments.py",
    "providers/responses/context/input_items.py",
    "providers/responses/context/messages.py",  # and the client's answers to approval requests
    "providers/responses/context/replay.py",
    "providers/responses/item_index.py",
    "providers/responses/store/url_files.py",
    # Anthropic's API has a web search of its own form
    "stack/http/messages/answer.py",
    "stack/http/messages/events.py",
    "stack/http/messages/server_tools.py",
    "stack/http/messages/tools.py",
    # the Agents API has calls and approvals of its own form, which wait for their client
    "providers/agents/activity.py",
    "providers/agents/commands.py",
    "providers/agents/output.py",
    "providers/agents/records.py",
    "providers/agents/transition.py",
    "providers/agents/turn_changes.py",
    # OpenAI's API has routes for images, which count as the tool does, and for the usage of these tools
    "stack/http/routes/images.py",
    "stack/http/routes/organization/usage.py",
}
"""Files outside of the tools and the wire that know a tool by the type of its item. A new tool adds none."""


def test_the_table_has_every_item_of_a_request_and_no_other() -> None:
    tags = {get_args(each)[1].tag.partition(":")[0] for each in get_args(get_args(Item)[0])}
    assert tags == ITEM_TYPES.keys()


def test_no_two_types_share_an_id_prefix() -> None:
    prefixes = [row.id_prefix for row in ITEM_TYPES.values() if row.id_prefix]
    assert len(prefixes) == len(set(prefixes))


def test_every_hosted_call_is_read_by_a_tool_of_the_registry() -> None:
    readable = {get_args(item.model_fields["type"].annotation)[0] for item in TYPES_BY_CALL_ITEM}
    assert readable >= HOSTED_CALL_TYPES


def test_the_functions_of_every_tool_are_where_the_registry_says() -> None:
    for row in TOOL_TYPES:
        assert isinstance(row.functions, ToolFunctions)
        assert row.is_imported
        assert row.counts_usage == (row.functions.sum_usage is not None), row.functions_name


def test_only_these_files_know_a_tool_by_its_item() -> None:
    types = ITEM_TYPES.keys() - COMMON
    classes = {get_args(each)[0].__name__ for each in get_args(get_args(Item)[0]) if get_args(each)[1].tag in types}
    for item in get_args(get_args(ResponseOutputItem)[0]):
        if get_args(item.model_fields["type"].annotation)[0] in types:
            classes.add(item.__name__)
    named = re.compile(rf"\b({'|'.join(types)})\b")
    tools = {
        str(file.relative_to(ROOT))
        for file in files_with(
            rf"\b({'|'.join((*types, *classes))})\b", python_files("apis", "providers", "stack", "configs")
        )
        if any(word in classes or named.search(word) for word in words(file))
    }
    assert {file for file in tools if not file.startswith(TOOLS_AND_WIRE)} == NAME_A_TOOLS_ITEM


def words(file: Path) -> Iterator[str]:
    """The imported names and the texts of a file, but for its docstrings."""
    docstrings = {id(node.value) for node in nodes(file) if isinstance(node, ast.Expr)}
    for node in nodes(file):
        if isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
