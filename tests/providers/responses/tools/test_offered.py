"""The tools that a request offers a model, their names, and the tool that each name stands for."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from apis.chat import ChatFunctionTool
from apis.errors import InvalidRequest
from apis.responses import CreateResponse
from apis.wire.items import Item
from providers.responses.events.response_object import begin_response
from providers.responses.item_index import ItemIndex
from providers.responses.tools.names import qualified_name
from providers.responses.tools.offered import ClientToolName, OfferedTools

Fields = dict[str, Any]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
CRM: Fields = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", "name": "find"}, {"type": "custom", "name": "note"}],
}
SECRET = "sk-very-secret"
MCP: Fields = {
    "type": "mcp",
    "server_label": "s",
    "server_url": f"https://me:{SECRET}@mcp.example.com:8443/{SECRET}?key={SECRET}",
    "authorization": SECRET,
    "headers": {"X-Key": SECRET},
    "allowed_tools": {"read_only": True},
    "require_approval": {"never": {"tool_names": ["add"]}},
}


def request_of(*tools: Fields, **fields: Any) -> CreateResponse:
    return CreateResponse.model_validate({"model": "m", "input": "hi", "tools": list(tools), **fields})


def test_a_model_that_knows_namespaces_is_offered_them() -> None:
    toolbox = OfferedTools(request_of(CRM), supports_namespaces=True)
    find, note = toolbox.offered_tools()
    assert isinstance(find, ChatFunctionTool)
    assert (find.name, find.function.namespace, note.name) == ("crm.find", "crm", "crm__note")
    assert toolbox.find_tool("crm.find") == ClientToolName("find", "crm")
    assert toolbox.find_tool("crm__note") == ClientToolName("note", "crm")
    assert toolbox.find_tool("find") is None


@pytest.mark.parametrize("name", ["browser", "python"])
def test_a_native_namespace_is_not_offered(name: str) -> None:
    toolbox = OfferedTools(request_of({**CRM, "name": name}), supports_namespaces=True)
    assert [tool.name for tool in toolbox.offered_tools()] == [f"{name}__find", f"{name}__note"]


@pytest.mark.parametrize("grouped", [True, False])
def test_a_tool_of_the_outermost_namespace_has_its_plain_name(grouped: bool) -> None:
    toolbox = OfferedTools(request_of({**CRM, "name": "functions"}), supports_namespaces=grouped)
    assert [tool.name for tool in toolbox.offered_tools()] == ["find", "note"]
    assert toolbox.find_tool("find") == ClientToolName("find", "functions")
    assert qualified_name("functions", "find", supports_namespaces=grouped) == "find"


def test_long_names_are_shortened_and_stay_apart() -> None:
    one, other = (qualified_name("n" * 60, f"{'x' * 40}{end}", supports_namespaces=False) for end in "ab")
    assert len(one) == len(other) == 64
    assert one != other


def test_the_prefix_functions_is_ignored_unless_a_tool_has_that_name() -> None:
    toolbox = OfferedTools(request_of({"type": "function", "name": "get"}))
    assert toolbox.find_tool("functions.get") == ClientToolName("get")
    assert toolbox.find_tool("functions.put") is None


def test_more_tools_than_a_model_can_be_offered_are_refused() -> None:
    tools = [{"type": "function", "name": f"f{number}"} for number in range(60)]
    with pytest.raises(InvalidRequest):
        OfferedTools(
            request_of(
                {**CRM, "tools": tools}, {**CRM, "name": "a", "tools": tools}, {**CRM, "name": "b", "tools": tools}
            )
        )


def test_a_tool_that_two_searches_return_is_offered_once() -> None:
    offers = {
        "type": "tool_search_output",
        "call_id": "c1",
        "tools": [{"type": "function", "name": "f", "defer_loading": True}],
    }
    toolbox = OfferedTools(request_of(), items=ItemIndex(ITEMS.validate_python([offers, offers])))
    assert [tool.name for tool in toolbox.offered_tools()] == ["f"]


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_are_neither_echoed_nor_shown() -> None:
    policy = {
        "type": "allowlist",
        "allowed_domains": ["a.b"],
        "domain_secrets": [{"domain": "a.b", "name": "K", "value": SECRET}],
    }
    code = {"type": "code_interpreter", "container": {"type": "auto", "network_policy": policy}}
    request = request_of(MCP, code)
    response = begin_response(request, "resp_1", created_at=5)
    for text in (response.model_dump_json(), request.model_dump_json(), repr(request), str(request)):
        assert SECRET not in text
    echoed = response.model_dump(exclude_unset=True)["tools"][0]
    assert echoed == {
        "type": "mcp",
        "server_label": "s",
        "server_url": "https://mcp.example.com:8443",
        "allowed_tools": {"read_only": True},
        "require_approval": {"never": {"tool_names": ["add"]}},
    }
    assert request.tools is not None
    assert request.tools[0].authorization == SECRET  # type: ignore[union-attr] # it is the MCP tool


ECHOED: dict[str, Fields] = {
    "mcp of a connector": {"type": "mcp", "server_label": "s", "connector_id": "connector_gmail"},
    "mcp of one of our own": {"type": "mcp", "server_label": "s", "connector_id": "ours", "allowed_tools": ["a"]},
    "code interpreter": {"type": "code_interpreter", "container": "cntr_1"},
    "code interpreter of its own": {"type": "code_interpreter"},
    "file search": {
        "type": "file_search",
        "vector_store_ids": ["vs_1"],
        "max_num_results": 5,
        "filters": {"type": "and", "filters": [{"type": "gte", "key": "year", "value": 2020}]},
        "ranking_options": {"ranker": "auto", "score_threshold": 0.5},
    },
    "tool search": {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    "local shell": {"type": "local_shell"},
    "shell": {"type": "shell", "environment": {"type": "local"}},
    "patch": {"type": "apply_patch"},
    "namespace": CRM,
}


@pytest.mark.parametrize("tool", ECHOED.values(), ids=ECHOED)
def test_every_tool_is_echoed_with_its_own_type(tool: Fields) -> None:
    (echoed,) = begin_response(request_of(tool), "resp_1", created_at=5).tools
    assert echoed.type == tool["type"]
    again = CreateResponse.model_validate({"model": "m", "tools": [echoed.model_dump(mode="json", exclude_unset=True)]})
    assert again.tools is not None
    assert again.tools[0].type == tool["type"]
