"""Tools are written as openai-harmony writes them, and no text of a caller gets out of its comment or string."""

import random
import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_harmony import (  # pyright: ignore[reportMissingTypeStubs] - typed in its source, without the marker file
    DeveloperContent,
    Message,
    Role,
)

from apis.chat import ChatFunctionTool
from providers.inference.harmony.tools import declared_tools_to_text, schema_to_typescript
from providers.inference.harmony.vocabulary import load_vocabulary
from tests.providers.harmony.conversations import described, request, user

words = st.sampled_from(["a", "the city", "Größe.", "x-y", "e.g. 【6†L9】", "it's", "null", ""])
names = st.sampled_from(["a", "b_c", "X-Api-Key", "é", "$ref", "z9", "@id"])
values = st.one_of(words, st.integers(-5, 5), st.booleans(), st.none(), st.lists(st.integers(0, 3), max_size=2))


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    notes: dict[str, st.SearchStrategy[Any]] = {
        "description": words,
        "title": words,
        "default": values,
        "nullable": st.booleans(),
        "examples": st.lists(values, max_size=2),
    }
    kinds = ["string", "number", "integer", "boolean", "null", "array", "object", "date"]
    plain = st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(
                st.sampled_from(kinds), st.lists(st.sampled_from(kinds[:-1]), max_size=3), st.just({"odd": 1})
            ),
            "enum": st.lists(values, max_size=3),
            **notes,
        },
    )

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        inner = inner | st.sampled_from([True, None, 3])
        return st.one_of(
            st.fixed_dictionaries(
                {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=4)},
                optional={"required": st.lists(names, max_size=3), **notes},
            ),
            st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional=notes),
            st.fixed_dictionaries({"oneOf": st.lists(inner, max_size=3)}, optional=notes),
            st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}, optional=notes),
        )

    return st.recursive(plain, larger, max_leaves=8)


@settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(parameters=schemas(), description=words)
def test_a_type_is_the_one_of_openai_harmony(parameters: dict[str, Any], description: str):
    tool = ChatFunctionTool.model_validate(
        {"function": {"name": "f", "description": description, "parameters": parameters}}
    )
    content = DeveloperContent.new().with_function_tools([described("f", description, parameters)])
    encoding = load_vocabulary().encoding
    theirs = encoding.decode(encoding.render(Message.from_role_and_content(Role.DEVELOPER, content)))
    assert f"<|start|>developer<|message|>{declared_tools_to_text([tool])}<|end|>" == theirs


def structure(text: str) -> list[str]:
    """The lines that are left without strings and comments."""
    bare = (re.sub(r'"(?:[^"\\]|\\.)*"', '""', line) for line in re.split(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", text))
    cut = (re.sub(r"\s*//.*", "", line) for line in bare)
    return [line for line in cut if line]


def tools_of(text: Any) -> str:
    odd = f"x {text()}"
    parameters: dict[str, Any] = {
        "type": "object",
        "description": text(),
        "properties": {
            odd: {"type": "string", "description": text(), "title": text(), "examples": [text()], "default": text()},
            "e": {"type": "string", "enum": [text(), text()], "default": text()},
            "o": {
                "description": text(),
                "default": text(),
                "oneOf": [
                    {"type": text(), "description": text(), "default": text()},
                    {"type": "string", "enum": ["a"], "description": text(), "default": text()},
                ],
            },
            "d": {"type": ["string", text()], "default": {text(): text()}},
            "n": {"type": "array", "items": {"oneOf": [{"description": text(), "default": text()}]}},
        },
        "required": [odd],
    }
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x" + text()}}
    tools = [
        {"type": "function", "function": {"name": "f", "description": text(), "parameters": parameters}},
        {"type": "custom", "custom": {"name": "g", "description": text(), "format": grammar}},
    ]
    return declared_tools_to_text(request(user("Hi"), tools=tools).tools or [])


def test_no_text_gets_out_of_its_comment_or_string():
    plain = structure(tools_of(lambda: "x"))
    rng = random.Random(5)
    scraps = ["\n", "\r", "\r\n", "\u2028", "\x85", '"', "\\", "}", "type h = () => any;", "//", " ", "x", "*/"]
    for _ in range(300):
        assert structure(tools_of(lambda: "".join(rng.choices(scraps, k=rng.randrange(1, 7))))) == plain


def test_a_schema_may_be_deep():
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    assert schema_to_typescript(schema).startswith("any[][]")
