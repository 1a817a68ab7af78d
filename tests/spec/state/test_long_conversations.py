"""A turn of a conversation costs the store as much after five hundred turns as after forty, whichever tool it has.

Rows and bytes are counted, not times. The conversation is compacted every few turns. STACK_TURNS says how many turns
there are (80 by default).
"""

import json
import os
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.counting_store import CountingSQLite
from tests.support.models.images import PIXEL_URL
from tests.support.models.skill_archives import FRONT_MATTER, inline, pack
from tests.support.sdk.answer_shapes import call, function
from tests.support.sdk.conversations import conversations
from tests.support.sdk.file_search_stack import store_of, vector_sections
from tests.support.sdk.requests import create
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import mcp, with_mcp
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
TURNS = int(os.environ.get("STACK_TURNS", "60"))
SOME = slice(20, 40)
MODEL = "tests.support.models.tireless:Tireless"
SUMMING: Json = {"context_management": [{"type": "compaction", "compact_threshold": 400}]}
SANDBOX = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
OTHERS = (
    *("custom", "namespace", "apply_patch", "local shell", "shell of the client"),
    *("computer of the preview", "shell of the server", "MCP"),
)
"""Cases of the long run: what each adds is stored as another case of the same kind stores it."""
CLICK: Json = {"type": "click", "x": 1, "y": 2, "button": "left"}
SKILL = pack(("greeting/SKILL.md", FRONT_MATTER))
PYTHON: Json = {"provider": "python", "timeout_s": 20, **SHARED_PYTHON}


@dataclass
class Case:
    """A tool as requests declare it, the call that the model makes in each turn, the answer of the client to a call, by
    its item, and what the server needs for it."""

    tool: Json
    call: Json
    answer: Callable[[Any], Json | None] = lambda _: None
    sections: Json = field(default_factory=dict[str, Any])
    state_bytes: int = 0
    """Bytes to which what it goes on with may grow: the newest 200 sources, which one turn reads and writes."""


def answer_with(kind: str, item_type: str, **output: Any) -> Callable[[Any], Json | None]:
    """Answer each call of a type."""

    def answer(item: Any) -> Json | None:
        return {"type": kind, "call_id": item.call_id, **output} if item.type == item_type else None

    return answer


def approve(item: Any) -> Json | None:
    if item.type != "mcp_approval_request":
        return None
    return {"type": "mcp_approval_response", "approval_request_id": item.id, "approve": True}


SHELL_OUTPUT: list[Json] = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
CASES: dict[str, Case] = {
    "function": Case(
        function("f"), call("f"), answer_with("function_call_output", "function_call", output="an output")
    ),
    "custom": Case(
        {"type": "custom", "name": "f"},
        call("f", "text", custom=True),
        answer_with("custom_tool_call_output", "custom_tool_call", output="an output"),
    ),
    "apply_patch": Case(
        {"type": "apply_patch"},
        call("apply_patch", '{"type": "delete_file", "path": "a"}'),
        answer_with("apply_patch_call_output", "apply_patch_call", status="completed"),
    ),
    "local shell": Case(
        {"type": "local_shell"},
        call("local_shell", '{"command": ["ls"]}'),
        lambda item: (
            {"type": "local_shell_call_output", "id": item.call_id, "output": "a"}
            if item.type == "local_shell_call"
            else None
        ),
    ),
    "shell of the client": Case(
        {"type": "shell", "environment": {"type": "local"}},
        call("shell", '{"commands": ["ls"]}'),
        answer_with("shell_call_output", "shell_call", output=SHELL_OUTPUT),
    ),
    "computer": Case(
        {"type": "computer"},
        call("computer", json.dumps({"actions": [CLICK]})),
        answer_with(
            "computer_call_output",
            "computer_call",
            output={"type": "computer_screenshot", "image_url": PIXEL_URL},
        ),
    ),
    "web search": Case(
        {"type": "web_search"},
        call("web_search", '{"query": "word"}'),
        state_bytes=90_000,
        sections={"tool_runtime": {"provider": "tests.support.servers.stepping_provider:Search", "slow_s": 0}},
    ),
    "code interpreter": Case(
        {"type": "code_interpreter", "container": {"type": "auto"}},
        call("python", '{"code": "print(1)"}'),
        sections={"tool_runtime": PYTHON},
    ),
    "shell of the server": Case(
        {"type": "shell", "environment": {"type": "container_auto"}},
        call("shell", '{"commands": ["echo a > f"]}'),
        sections={"tool_runtime": PYTHON},
    ),
    "skill of the request": Case(
        {"type": "shell", "environment": {"type": "container_auto", "skills": [inline(SKILL)]}},
        call("shell", '{"commands": ["cat /mnt/skills/greeting/SKILL.md"]}'),
        sections={"tool_runtime": PYTHON},
    ),
    "stored skill": Case(
        {"type": "shell", "environment": {"type": "container_auto"}},
        call("shell", '{"commands": ["cat /mnt/skills/greeting/SKILL.md"]}'),
        sections={"tool_runtime": PYTHON, "skills": {"provider": "kv"}},
    ),
    "file search": Case({"type": "file_search"}, call("file_search", '{"queries": ["whales"]}'), state_bytes=90_000),
    "computer of the preview": Case(
        {"type": "computer_use_preview", "display_width": 1024, "display_height": 768, "environment": "browser"},
        call("computer", json.dumps({"action": CLICK})),
        answer_with(
            "computer_call_output",
            "computer_call",
            output={"type": "computer_screenshot", "image_url": PIXEL_URL},
        ),
    ),
    "namespace": Case(
        {"type": "namespace", "name": "crm", "description": "d", "tools": [function("f")]},
        call("crm__f"),
        answer_with("function_call_output", "function_call", output="an output"),
    ),
    "tool search": Case({"type": "tool_search"}, call("tool_search", '{"query": "weather"}')),
    "MCP": Case({}, call("real__echo", '{"text": "a"}')),
    "MCP with approvals": Case({"require_approval": "always"}, call("real__echo", '{"text": "a"}'), approve),
}


@asynccontextmanager
async def serving_case(name: str, folder: Path) -> AsyncGenerator[tuple[Served, list[Json]]]:
    """A stack for a case, and the tools of its requests."""
    case = CASES[name]
    tools = [case.tool]
    sections = dict(case.sections)
    async with AsyncExitStack() as stacks:
        if name.startswith("MCP"):
            real = RealServer()
            await stacks.enter_async_context(real.serving("streamable_http"))
            sections["tool_servers"] = with_mcp(real.url)
            tools = [mcp(real, **case.tool)]
        if name == "tool search":
            tools.append(function("get_weather", description="The weather.", defer_loading=True))
            tools.append(function("list_orders", description="Open orders.", defer_loading=True))
        more: Json = {"skills": sections.pop("skills")} if "skills" in sections else {}
        if name == "file search":
            more = vector_sections(folder)
        store = {"provider": "tests.support.counting_store:CountingSQLite", "path": str(folder / "store.db")}
        inference = {"provider": MODEL, "call": case.call}
        served = await stacks.enter_async_context(serving(inference, more=more, kv_store=store, **sections))
        if name == "file search":
            tools = [{**case.tool, "vector_store_ids": [(await store_of(served))[0]]}]
        if name == "stored skill":
            skill: Any = await served.client.skills.create(files=("s.zip", SKILL, "application/zip"))
            reference = {"type": "skill_reference", "skill_id": skill.id}
            tools = [{"type": "shell", "environment": {"type": "container_auto", "skills": [reference]}}]
        yield served, tools


@SANDBOX
@pytest.mark.timeout(60 + 2 * TURNS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in OTHERS else []) for name in CASES]
)
async def test_a_turn_of_a_long_conversation_costs_as_much_as_one_of_a_short_one(name: str, tmp_path: Path) -> None:
    rows, sizes = list[int](), list[int]()
    async with serving_case(name, tmp_path) as (served, tools):
        conversation = await conversations(served).create()
        for _ in range(TURNS):
            before = CountingSQLite.rows["default"], CountingSQLite.sizes["default"]
            next_input: Any = "call"
            called: list[str] = []
            while next_input:
                response = await create(served, input=next_input, conversation=conversation.id, tools=tools, **SUMMING)
                assert response.status == "completed", response
                answers = map(CASES[name].answer, response.output)
                next_input = [answer for answer in answers if answer is not None]
                called += [item.type for item in response.output if item.type.endswith("_call")]
            assert called
            rows.append(CountingSQLite.rows["default"] - before[0])
            sizes.append(CountingSQLite.sizes["default"] - before[1])
    assert max(rows[-20:]) <= 1.2 * max(rows[SOME])
    assert max(sizes[-20:]) <= 1.2 * max(sizes[SOME]) + CASES[name].state_bytes
