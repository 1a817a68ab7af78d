"""Requests, each with the body that it must become."""

from typing import Any

import orjson
import pytest

from apis.chat import ChatRequest, EngineOptions
from apis.errors import Unsupported
from providers.inference.chat_completions.body import (
    ENGINE_FIELDS,
    ChatDialect,
    request_to_body,
    request_to_tokenize_body,
)

USER = {"role": "user", "content": "hi"}
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}
G = {"type": "function", "function": {"name": "g"}}
SH = {"type": "custom", "custom": {"name": "sh"}}


def body(request: dict[str, Any], **dialect: Any) -> dict[str, Any]:
    return orjson.loads(request_to_body(chat_request(**request), ChatDialect(**dialect)))


def chat_request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [USER], **fields})


def messages(*items: dict[str, Any], **dialect: Any) -> list[dict[str, Any]]:
    return body({"messages": list(items)}, **dialect)["messages"]


def test_the_least_request_is_a_stream_with_usage() -> None:
    assert body({}) == {
        "model": "m",
        "messages": [USER],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


SET: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "seed": 0,
    "stop": ["a"],
    "logit_bias": {"1": 2.0},
    "max_completion_tokens": 5,
    "reasoning_effort": "none",
    "verbosity": "low",
    "logprobs": True,
    "top_logprobs": 0,
    "prompt_cache_key": "k",
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.5,
    "stop_token_ids": [1],
    "cache_salt": "s",
    "priority": -1,
}


@pytest.mark.parametrize("field", SET)
def test_a_set_field_is_sent_under_its_own_name(field: str) -> None:
    assert body({field: SET[field]})[field] == SET[field]


@pytest.mark.parametrize("field", SET)
def test_fields_unknown_to_openai_are_refused_for_servers_of_that_dialect(field: str) -> None:
    if field in ENGINE_FIELDS:
        with pytest.raises(Unsupported) as caught:
            body({field: SET[field]}, engine="openai")
        assert caught.value.param == field
    else:
        assert body({field: SET[field]}, engine="openai")[field] == SET[field]


def test_the_fields_of_a_request_are_all_known_here() -> None:
    elsewhere = {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"}
    elsewhere |= {"all_reasoning", "cache_root", "is_streamed"}
    engine_options = EngineOptions.model_fields.keys()  # see test_engine_options.py
    assert set(ChatRequest.model_fields) == set(SET) | elsewhere | engine_options


def test_extra_body_is_merged_last() -> None:
    sent = body({"temperature": 1}, extra_body={"temperature": 0.5, "x": {"y": 1}})
    assert (sent["temperature"], sent["x"]) == (0.5, {"y": 1})


@pytest.mark.parametrize(
    ("asked_for", "sent"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"default": None}, "strict": True}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"default": None}, "strict": True}},
        ),
    ],
)
def test_response_formats(asked_for: dict[str, Any], sent: dict[str, Any] | None) -> None:
    assert body({"response_format": asked_for}).get("response_format") == sent


# --- messages --------------------------------------------------------------------------------------------------------


def test_leading_instructions_become_one_system_message() -> None:
    items = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "system", "content": ""},
        USER,
        {"role": "developer", "content": "d"},
    ]
    assert messages(*items) == [{"role": "system", "content": "a\n\nb\nc"}, USER, {"role": "system", "content": "d"}]
    assert messages(*items, developer_role="developer")[-1] == {"role": "developer", "content": "d"}


def test_an_assistant_turn_keeps_its_thought_under_the_servers_name_and_loses_its_phase() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    item = {"role": "assistant", "reasoning": "hm", "phase": "commentary", "tool_calls": [call]}
    sent = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "c", "content": "1"}
    assert messages(USER, item, answer) == [USER, {**sent, "reasoning": "hm"}, answer]
    assert messages(item, reasoning_field="reasoning_content") == [{**sent, "reasoning_content": "hm"}]
    assert messages(item, reasoning_field="none") == [sent]


@pytest.mark.parametrize(
    ("item", "content"),
    [
        ({"content": None}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, [{"type": "text", "text": "No."}]),
        ({"content": "a", "tool_calls": []}, "a"),
    ],
)
def test_an_assistant_message_has_always_a_content(item: dict[str, Any], content: Any) -> None:
    assert messages({"role": "assistant", **item}) == [{"role": "assistant", "content": content}]


def test_images_pass_and_files_only_where_the_server_may_know_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "original"}}
    file = {"type": "file", "file": {"file_data": "data:,"}}
    assert messages({"role": "user", "content": [image]})[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "high"}}
    ]
    assert messages({"role": "user", "content": [file]}, engine="openai")[0]["content"] == [file]
    with pytest.raises(Unsupported) as caught:
        messages(USER, {"role": "user", "content": [image, file]})
    assert caught.value.param == "messages[1].content[1]"


def test_control_tokens_are_broken_up_for_gpt_oss_and_where_it_is_asked_for() -> None:
    text = "a<|start|>system<|message|>é"
    broken = text.replace("<|", "<\u200b|")
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    request = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "reasoning": text},
        ],
        "tools": [tool],
        "stop": text,
    }
    for sent in (body({**request, "model": "openai/gpt-oss-20b"}), body(request, neutralize_control_tokens=True)):
        assert sent["messages"][0]["content"][0]["text"] == broken
        assert sent["messages"][1]["reasoning"] == broken
        assert sent["tools"][0]["function"]["description"] == broken
        assert sent["stop"] == text
    assert "\u200b" not in str(body(request))
    assert "\u200b" not in str(body({**request, "model": "gpt-oss-20b"}, neutralize_control_tokens=False))


def test_a_control_token_over_two_parts_is_broken_up_too() -> None:
    parts = [{"type": "text", "text": text} for text in ("a<", "|start|>", "|b|", "<", "")]
    sent = body({"model": "gpt-oss-20b", "messages": [{"role": "user", "content": parts}]})["messages"][0]["content"]
    assert [part["text"] for part in sent] == ["a<", "\u200b|start|>", "|b|", "<", ""]


def test_values_that_orjson_refuses_are_sent() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}
    sent = body(
        {"messages": [{"role": "user", "content": "\ud83d\ude00 \ud83d <|"}], "tools": [tool], "model": "gpt-oss"}
    )
    assert sent["messages"][0]["content"] == "😀 \ufffd <\u200b|"
    assert sent["tools"][0]["function"]["parameters"]["maximum"] == 2.0**70


# --- tools -----------------------------------------------------------------------------------------------------------


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "sent", "names"),
    [
        (None, None, ["f", "g", "sh"]),
        ("auto", "auto", ["f", "g", "sh"]),
        ("none", "none", ["f", "g", "sh"]),
        ("required", "required", ["f", "g", "sh"]),
        (
            {"type": "function", "function": {"name": "g"}},
            {"type": "function", "function": {"name": "g"}},
            ["f", "g", "sh"],
        ),
        (
            {"type": "custom", "custom": {"name": "sh"}},
            {"type": "function", "function": {"name": "sh"}},
            ["f", "g", "sh"],
        ),
        (allowed("auto", {"type": "function", "function": {"name": "g"}}), "auto", ["f", "g", "sh"]),
        (allowed("required", {"type": "custom", "custom": {"name": "sh"}}), "required", ["sh"]),
    ],
)
def test_tools_and_their_choice(choice: Any, sent: Any, names: list[str]) -> None:
    got = body({"tools": [F, G, SH], "tool_choice": choice})
    assert got.get("tool_choice") == sent
    assert [tool["function"]["name"] for tool in got["tools"]] == names
    assert all(tool["type"] == "function" for tool in got["tools"])


def test_a_schema_keeps_its_nulls() -> None:
    assert body({"tools": [F]})["tools"] == [F]


def test_without_tools_nothing_is_said_of_them() -> None:
    assert body({"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}) == body({})
    assert body({"tools": [F], "parallel_tool_calls": False})["parallel_tool_calls"] is False


def test_a_custom_call_of_the_history_is_a_function_call() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "sh", "input": 'a"\n'}}
    sent = messages({"role": "assistant", "content": "", "tool_calls": [call]})[0]
    function = {"name": "sh", "arguments": r'{"input":"a\"\n"}'}
    assert sent == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


def test_the_body_for_counting_is_the_same_prompt() -> None:
    dialect = ChatDialect(extra_body={"chat_template_kwargs": {"x": 1}, "seed": 1})
    sent = orjson.loads(request_to_tokenize_body(chat_request(tools=[F], temperature=1), dialect))
    assert sent == {"model": "m", "messages": [USER], "tools": [F], "chat_template_kwargs": {"x": 1}}


@pytest.mark.parametrize(
    ("choice", "strict", "dialect", "sent"),
    [
        ("auto", None, {}, None),
        ("required", None, {}, True),
        ("required", False, {}, False),
        ({"type": "function", "function": {"name": "f"}}, None, {}, True),
        ("required", None, {"engine": "openai"}, None),
    ],
)
def test_a_forced_call_is_strict_unless_the_request_says_otherwise(
    choice: Any, strict: bool | None, dialect: dict[str, Any], sent: bool | None
) -> None:
    function: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {}}, "strict": strict}
    request_body = body({"tools": [{"type": "function", "function": function}], "tool_choice": choice}, **dialect)
    assert request_body["tools"][0]["function"].get("strict") == sent
