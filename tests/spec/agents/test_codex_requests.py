"""The requests of the Codex CLI, as its version 0.169.0 sends them over `wire_api = "responses"`: no field of them is
refused, and the model reads next what the CLI sends back of a turn. `tests/live/test_codex.py` runs the CLI itself."""

from typing import Any, Final

import pytest

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import bare, chat_requests, messages, responses
from tests.support.servers.serving import Served, scripted, serving

Json = dict[str, Any]
PATCH_GRAMMAR: Final = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
EXEC_GRAMMAR: Final = """
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE

PRAGMA_LINE: /[ \\t]*\\/\\/ @exec:[^\\r\\n]*/
NEWLINE: /\\r?\\n/
SOURCE: /[\\s\\S]+/
"""
COMMAND: Final[Json] = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
TOOLS: Final[list[Json]] = [
    COMMAND,
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    {
        "type": "tool_search",
        "execution": "client",
        "description": "# Tool discovery",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
]
ADDITIONAL_TOOLS: Final[Json] = {
    "type": "additional_tools",
    "id": "at_01a20457-eea4-79e0-92cd-c99ac21e8f39",
    "role": "developer",
    "tools": [
        {
            "type": "namespace",
            "name": "functions",
            "description": "",
            "tools": [
                {
                    "type": "custom",
                    "name": "exec",
                    "description": "Runs JavaScript.",
                    "format": {"type": "grammar", "syntax": "lark", "definition": EXEC_GRAMMAR},
                },
                {**COMMAND, "name": "wait"},
            ],
        },
        {
            "type": "namespace",
            "name": "collaboration",
            "description": "Tools for spawning and managing sub-agents.",
            "tools": [{**COMMAND, "name": "spawn_agent"}],
        },
    ],
}
FIELDS: Final[Json] = {
    "model": "gpt-5.5",
    "stream": True,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a20457-e07a-7af3-8490-359a2e51a8c7",
    "text": {"verbosity": "low"},
    "extra_body": {
        "client_metadata": {
            "x-codex-installation-id": "e33322c2-7a34-4770-8c62-778cab35e285",
            "x-codex-window-id": "01a20457-e07a-7af3-8490-359a2e51a8c7:0",
            "x-codex-turn-metadata": '{"request_kind":"turn"}',
        }
    },
    "extra_headers": {
        "x-codex-beta-features": "remote_compaction_v2",
        "session-id": "01a20457-e07a-7af3-8490-359a2e51a8c7",
        "originator": "codex_exec",
    },
}


def message(number: int, role: str, text: str) -> Json:
    """A message with an id of Codex's own, which is not in the form of this server's ids."""
    return {
        "type": "message",
        "id": f"msg_01a20457-e0e6-71b0-83d9-{number:012x}",
        "role": role,
        "content": [{"type": "input_text", "text": text}],
    }


async def turn(served: Served, items: list[Json], **fields: Any) -> Any:
    """Send a turn, add its output to `items` as Codex does, and return the response."""
    events = [event async for event in await responses(served).create(**{**FIELDS, "input": items, **fields})]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    done = [bare(event.item) for event in events if event.type == "response.output_item.done"]
    items += [{name: value for name, value in item.items() if value is not None} for item in done]
    return events[-1].response


@pytest.mark.parametrize("effort", ["medium", None])
async def test_a_session_of_codex_runs_resumes_and_patches(effort: str | None) -> None:
    patch = "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch\n"
    model = scripted(
        [{"reasoning": "I look."}, call("exec_command", '{"cmd": "echo 42"}', id="call_1")],
        [{"text": "All done."}],
        [call("apply_patch", patch, custom=True, id="call_2")],
        [{"text": "Patched."}],
        model="gpt-5.5",
    )
    items = [
        message(1, "developer", "You are Codex."),
        message(2, "user", "<environment_context/>"),
        message(3, "user", "Go on."),
    ]
    fields: Json = {"tools": TOOLS, "reasoning": {"effort": effort}}
    async with serving(model) as served:
        first = await turn(served, items, **fields)
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        assert items[-2]["encrypted_content"].startswith("rs3.")
        assert first.usage.total_tokens > 0
        output = {"id": "fco_01a20457-e279-7332-8415-cf1ec0fdef4a", "call_id": "call_1", "output": "Output:\n42\n"}
        items.append({"type": "function_call_output", **output})
        assert (await turn(served, items, **fields)).output_text == "All done."
        assert [each["role"] for each in messages(served)] == ["developer", "user", "user", "assistant", "tool"]
        assert messages(served)[-2]["reasoning"] == "I look."
        assert messages(served)[-1]["content"] == "Output:\n42\n"

        items.append(message(4, "user", "Go on."))
        third = await turn(served, items, **fields)
        assert (third.output[0].type, third.output[0].input) == ("custom_tool_call", patch)
        output = {"id": "ctco_01a20457-e7f6-7aa1-8f33-3a50063fa70c", "call_id": "call_2", "output": "Exit code: 0"}
        items.append({"type": "custom_tool_call_output", **output})
        assert (await turn(served, items, **fields)).output_text == "Patched."
        assert messages(served)[-1]["content"] == "Exit code: 0"
        assert [tool.name for tool in chat_requests(served)[-1].tools or ()] == [
            "exec_command",
            "apply_patch",
            "tool_search",
        ]


async def test_the_tools_of_a_session_may_come_in_namespaces_of_its_input() -> None:
    source = "text((await tools.exec_command({cmd: 'echo 42'})).output)"
    model = scripted([call("exec", source, custom=True, id="call_1")], [{"text": "All done."}], model="gpt-5.6-sol")
    items = [ADDITIONAL_TOOLS, message(1, "developer", "You are Codex."), message(2, "user", "Go on.")]
    fields: Json = {
        "model": "gpt-5.6-sol",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "context": "all_turns"},
    }
    async with serving(model) as served:
        first = await turn(served, items, **fields)
        assert (first.output[0].name, first.output[0].namespace) == ("exec", "functions")
        assert first.output[0].input == source
        items.append(
            {
                "type": "custom_tool_call_output",
                "id": "ctco_01a20457-f054-7b32-89bc-1a54e742acb7",
                "call_id": "call_1",
                "output": [{"type": "input_text", "text": "Script completed"}, {"type": "input_text", "text": "42"}],
            }
        )
        assert (await turn(served, items, **fields)).output_text == "All done."
        assert [part["text"] for part in messages(served)[-1]["content"]] == ["Script completed", "42"]
        names = [tool.name for tool in chat_requests(served)[-1].tools or ()]
    assert len(names) == 3
    assert "exec" in names
