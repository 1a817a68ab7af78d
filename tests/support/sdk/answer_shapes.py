"""Scripts of every shape a model's answer may have."""

from typing import Any

Script = list[dict[str, Any]]


def call(name: str = "get", *arguments: str, **fields: Any) -> dict[str, Any]:
    """A call of a script, its arguments in pieces."""
    return {"call": name, "arguments": [*arguments] or ["{}"], **fields}


def function(name: str = "get", **fields: Any) -> dict[str, Any]:
    """A function tool as the Responses API declares it."""
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **fields}


SHAPES: dict[str, Script] = {
    "text": [{"text": "Hello."}],
    "text in pieces": [{"text": ["Hel", "lo", "."]}],
    "nothing": [],
    "an empty piece": [{"text": ["", "Hello", ""]}],
    "letters beyond ASCII": [{"text": ["na\u00efve ", "\U0001f600\u200d", "\u4f60\u597d", "\u2028\r\n\t\x00\x7f"]}],
    "lines that look like frames": [{"text": ["data: [DONE]\n\n", "event: x\ndata: {}\n\n", ": comment\n\n"]}],
    "reasoning, then text": [{"reasoning": ["think", "ing"]}, {"text": ["Hel", "lo"]}],
    "reasoning only": [{"reasoning": ["hm"]}],
    "reasoning between texts": [{"text": "a"}, {"reasoning": "b"}, {"text": "c"}, {"reasoning": "d"}],
    "a preamble and an answer": [
        {"text": ["Let me ", "see."], "phase": "commentary"},
        {"text": ["It ", "is."], "phase": "final_answer"},
    ],
    "a refusal": [{"refusal": ["I will ", "not."]}],
    "text, then a refusal in the same message": [{"text": "Well. "}, {"refusal": ["No", "."]}],
    "a refusal, then text": [{"refusal": "No."}, {"text": "But."}],
    "a call": [call("get", '{"a"', ": 1}")],
    "a call without arguments": [{"call": "get", "arguments": ""}],
    "calls one after the other": [call("get", '{"n":', "1}"), call("get", '{"n":2}'), call("put", '{"n":3}')],
    "calls in parallel": [
        {"calls": [call("get", '{"a"', ":", "1}"), call("put", '{"b"', ":2}"), call("get", "{", '"c"', ":", "3", "}")]}
    ],
    "a custom call": [call("patch", "*** Begin", "\n*** End", custom=True)],
    "a function and a custom call in parallel": [
        {"calls": [call("get", '{"a"', ":1}"), call("patch", "*** ", "End", custom=True)]}
    ],
    "reasoning, text and a call": [{"reasoning": "hm"}, {"text": "I look.", "phase": "commentary"}, call()],
    "text behind a call": [call(), {"text": "Done."}],
    "reasoning between calls": [{"reasoning": "one"}, call("get", "{}"), {"reasoning": "two"}, call("put", "{}")],
}
