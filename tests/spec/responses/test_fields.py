"""Fields of OpenAI's API that this server does not use, through the official SDK: echoed truly or refused by name."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError, NotFoundError

from tests.stack.http.raw import ask, check_error
from tests.support.sdk.answer_shapes import function
from tests.support.sdk.requests import chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.serving import Served, scripted, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving() as served:
        yield served


MOVED = {
    "max_tokens": (16, "max_output_tokens"),
    "response_format": ({"type": "json_object"}, "text.format"),
    "reasoning_effort": ("low", "reasoning.effort"),
    "verbosity": ("low", "text.verbosity"),
    "functions": ([{"name": "f"}], "tools"),
}


@pytest.mark.parametrize("name", MOVED)
async def test_a_name_of_chat_completions_is_refused_with_the_new_name(served: Served, name: str) -> None:
    """The error is OpenAI's own."""
    value, new = MOVED[name]
    error = await refusal(served, extra_body={name: value})
    assert error["message"] == (
        f"Unsupported parameter: '{name}'. In the Responses API, this parameter has moved to '{new}'."
    )
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


REFUSED: dict[str, tuple[Json, str]] = {
    "a program of access": ({"access_programs": {"cyber": "daybreak_red"}}, "access_programs.cyber"),
    "a window without background": (
        {"background_options": {"completion_window": "2h"}},
        "background_options.completion_window",
    ),
    "a window of a ranked tier": (
        {"background": True, "service_tier": "flex", "background_options": {"completion_window": "2h"}},
        "background_options.completion_window",
    ),
    "a window that is none": (
        {"background": True, "background_options": {"completion_window": "8x"}},
        "background_options.completion_window",
    ),
    "a window beyond a week": (
        {"background": True, "background_options": {"completion_window": "8d"}},
        "background_options.completion_window",
    ),
    "compressed images": ({"image": {"context_compression": "enabled"}}, "image.context_compression"),
    "the mode pro": ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    "callers that are programs": (
        {"tools": [{**function("f"), "allowed_callers": ["programmatic"]}]},
        "tools[0].allowed_callers",
    ),
    "a prewarm in the background": (
        {"background": True, "prompt_cache_options": {"prewarm": True}},
        "prompt_cache_options.prewarm",
    ),
    "a drawing": ({"tools": [{"type": "image_generation", "output_format": "svg"}]}, "tools[0].output_format"),
    "a drawing's author": ({"tools": [{"type": "image_generation", "svg": {"model": "m"}}]}, "tools[0].svg"),
    "a program": (
        {"input": [{"type": "program", "id": "p", "call_id": "c", "code": "", "fingerprint": ""}]},
        "input[0].type",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_offered_is_refused_by_name(served: Served, name: str) -> None:
    """Neither dropped nor called invalid."""
    fields, param = REFUSED[name]
    error = await refusal(served, **fields)
    assert error["param"] == param
    assert "not offered by this server" in error["message"] or "background" in error["message"]


ABSENT_CALLS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "/realtime": lambda client: client.realtime.client_secrets.create(),
    "/live": lambda client: client.post("/live/sessions", cast_to=dict),
    "/videos": lambda client: client.get("/videos", cast_to=dict),
    "/evals": lambda client: client.evals.list(),
    "/fine_tuning": lambda client: client.fine_tuning.jobs.list(),
}


@pytest.mark.parametrize("row", ABSENT_CALLS)
async def test_a_route_that_is_not_here_is_refused_by_name(served: Served, row: str) -> None:
    """G24, the table "Routes without an answer", by its rows."""
    with pytest.raises(NotFoundError) as caught:
        await ABSENT_CALLS[row](served.client)
    assert f"'/v1{row}' is not offered by this server." in caught.value.message


async def test_stored_chat_completions_are_refused_by_name(served: Served) -> None:
    """Stored chat completions are neither an unknown URL nor a wrong method."""
    completions: Any = served.client.chat.completions
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    for call in (
        completions.create(**chat, store=True),
        completions.list(),
        completions.retrieve("chatcmpl-1"),
        completions.update("chatcmpl-1", metadata={}),
        completions.delete("chatcmpl-1"),
        completions.messages.list("chatcmpl-1"),
    ):
        with pytest.raises(BadRequestError) as caught:
            await call
        assert caught.value.param == "store"
        assert "is not offered by this server" in caught.value.message


ABSENT_ROUTES: dict[str, tuple[Callable[[Any], Awaitable[Any]], str]] = {
    "deleting a model": (lambda client: client.models.delete("org/model"), "stack models remove"),
    "variations": (lambda client: client.images.create_variation(image=b"x"), "use images.edit"),
    "speech": (lambda client: client.audio.speech.create(model="m", voice="alloy", input="x"), "write text"),
    "translations": (
        lambda client: client.audio.translations.create(model="m", file=b"x"),
        "use audio.transcriptions",
    ),
    "voices": (lambda client: client.get("/audio/voices/v", cast_to=dict), "write text"),
    "consents": (lambda client: client.get("/audio/voice_consents", cast_to=dict), "write text"),
    "batches of messages": (
        lambda client: client.post("/messages/batches", body={"requests": []}, cast_to=dict),
        "use /v1/batches",
    ),
}


@pytest.mark.filterwarnings("ignore:deprecated")
@pytest.mark.parametrize("row", ABSENT_ROUTES)
async def test_a_single_route_that_is_not_here_says_what_to_use(served: Served, row: str) -> None:
    call, instead = ABSENT_ROUTES[row]
    with pytest.raises(BadRequestError) as caught:
        await call(served.client)
    assert "not offered by this server" in caught.value.message
    assert instead in caught.value.message


OTHER_DIALECTS: dict[str, str] = {
    "/api/chat": "'/api' is not offered by this server. This is a path of Ollama: use chat completions",
    "/v1/api/tags": "'/api' is not offered by this server. This is a path of Ollama",
    "/v1beta/models/m:generateContent": "'/v1beta' is not offered by this server. This is a path of Gemini",
    "/v2/chat": "'/v2' is not offered by this server. This is a path of Cohere",
    "/v1/rerank": "'/v1/rerank' is not offered by this server. Use the search of a vector store",
    "/score": "'/v1/score' is not offered by this server. Use decisions",
    "/tokenize": "'/v1/tokenize' is not offered by this server. Use responses.input_tokens",
    "/v1/novelty": "Unknown request URL",
}


@pytest.mark.parametrize("path", OTHER_DIALECTS)
async def test_a_path_of_another_server_says_what_to_use(served: Served, path: str) -> None:
    answer = await ask(served.url, b"{}", path=path)
    assert OTHER_DIALECTS[path] in check_error(answer, 404)["message"]


async def test_a_response_of_several_agents_is_refused_by_name(served: Served) -> None:
    beta: Any = served.client.beta.responses
    asking: dict[str, Any] = {"model": "scripted", "input": "hi"}
    with pytest.raises(BadRequestError) as caught:
        await beta.create(**asking, multi_agent={"enabled": True})
    assert caught.value.param == "multi_agent"
    assert (await beta.create(**asking, multi_agent={"enabled": False})).status == "completed"
    message: Json = {"type": "agent_message", "id": "msg_1", "author": "a", "recipient": "b", "content": []}
    assert (await refusal(served, input=[message]))["param"] == "input[0].type"


async def test_items_of_programs_are_echoed_or_refused_by_name(served: Served) -> None:
    """G24, the row programmatic_tool_calling: a caller comes back as it was sent, a program is refused."""
    caller = {"type": "program", "caller_id": "p_1"}
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": caller, "async": True},
        {"type": "function_call_output", "call_id": "c", "output": "1", "caller": caller},
    ]
    response = await create(served, input=items)
    listed = await responses(served).input_items.list(response.id, order="asc")
    assert [item.to_dict().get("caller") for item in listed.data] == [None, caller, caller]
    assert listed.data[1].to_dict()["async"] is True
    refused: list[Json] = [
        {"tools": [{"type": "programmatic_tool_calling"}]},
        {"tool_choice": {"type": "programmatic_tool_calling"}},
        {"input": [{"type": "program_output", "id": "o", "call_id": "c", "result": "", "status": "completed"}]},
    ]
    for fields in refused:
        assert "is not offered by this server" in (await refusal(served, **fields))["message"]


ECHOED: dict[str, tuple[Json, Json]] = {
    "cache options": (
        {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}},
    ),
    "a comparison": (
        {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
        {
            "prompt_cache_options": {"mode": "implicit", "ttl": "30m", "comparison_response_id": "resp_1"},
            "prompt_cache_diagnostics": {"type": "comparison_response_not_found"},
        },
    ),
    "the standard program": ({"access_programs": {"cyber": "standard"}}, {"access_programs": {"cyber": "standard"}}),
    "plain images": ({"image": {"context_compression": "auto"}}, {"image": {"context_compression": "disabled"}}),
    "the soonest window": ({"background_options": {"completion_window": "soonest"}}, {}),
}


@pytest.mark.parametrize("name", ECHOED)
async def test_an_option_without_an_effect_is_echoed(served: Served, name: str) -> None:
    """The response says what the request asked for."""
    fields, echoed = ECHOED[name]
    response = (await create(served, **fields)).to_dict()
    assert {key: response[key] for key in echoed} == echoed


async def test_the_mode_of_reasoning_is_echoed(served: Served) -> None:
    """'standard' is the mode that there is."""
    assert (await create(served, reasoning={"mode": "standard"})).reasoning.mode == "standard"


async def test_the_output_schema_of_a_function_is_echoed(served: Served) -> None:
    """Output_schema, async and allowed_callers come back."""
    tool = {**function("f"), "output_schema": {"type": "object"}, "async": True, "allowed_callers": ["direct"]}
    response = (await create(served, tools=[tool])).to_dict()
    assert response["tools"][0]["output_schema"] == {"type": "object"}
    assert response["tools"][0]["async"] is True
    assert response["tools"][0]["allowed_callers"] == ["direct"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prewarm_calls_no_model(served: Served, streamed: bool) -> None:
    """Later requests continue the input, and no model is called for the first."""
    before = len(chat_requests(served))
    options: Json = {"prompt_cache_options": {"prewarm": True}}
    warm = (await stream(served, **options))[-1].response if streamed else await create(served, **options)
    assert (warm.status, warm.output, len(chat_requests(served))) == ("completed", [], before)
    await create(served, input="and now", previous_response_id=warm.id)
    assert [message["content"] for message in messages(served)] == ["hi", "and now"]


async def test_the_output_of_a_function_may_name_the_function() -> None:
    """Without a call_id the output belongs to the oldest open call of that name."""
    calls = {"calls": [{"call": "f", "id": "c1"}, {"call": "g", "id": "c2"}, {"call": "f", "id": "c3"}]}
    async with serving(scripted([calls], [{"text": "Done."}])) as served:
        tools = [function("f"), function("g")]
        first = await create(served, tools=tools)
        outputs = [
            {"type": "function_call_output", "name": name, "output": text}
            for name, text in (("g", "two"), ("f", "one"), ("f", "three"))
        ]
        await create(served, tools=tools, previous_response_id=first.id, input=outputs)
        tool_messages = [message for message in messages(served) if message["role"] == "tool"]
        contents = {message["tool_call_id"]: message["content"] for message in tool_messages}
        assert contents == {"c1": "one", "c2": "two", "c3": "three"}
        with pytest.raises(BadRequestError, match="function 'h'"):
            await create(served, tools=tools, input=[{"type": "function_call_output", "name": "h", "output": "x"}])


async def test_an_output_that_names_a_function_does_not_take_an_id_that_another_function_has_taken_over() -> None:
    """The later of two calls with one id has it, and the output of the first function is that of its next
    call."""
    calls = [
        {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}
        for call_id, name in (("c1", "f"), ("c1", "g"), ("c2", "f"))
    ]
    outputs = [
        {"type": "function_call_output", "name": "f", "output": "two"},
        {"type": "function_call_output", "name": "g", "output": "one"},
    ]
    async with serving(scripted([{"text": "Done."}])) as served:
        await create(served, tools=[function("f"), function("g")], input=[*calls, *outputs])
        tool_messages = [message for message in messages(served) if message["role"] == "tool"]
    assert {message["tool_call_id"]: message["content"] for message in tool_messages} == {"c1": "one", "c2": "two"}


async def test_an_image_of_an_earlier_history_is_input(served: Served) -> None:
    """A history with an image_generation_call can be continued, and is listed as it was sent."""
    image = {
        "type": "image_generation_call",
        "id": "ig_1",
        "status": "completed",
        "result": "aGk=",
        "revised_prompt": "A cat.",
        "quality": "low",
    }
    response = await create(
        served, input=[{"role": "user", "content": "Draw."}, image, {"role": "user", "content": "?"}]
    )
    _, called, output, _ = messages(served)
    assert called["tool_calls"][0]["function"] == {"name": "image_generation", "arguments": '{"prompt":"A cat."}'}
    assert output["content"] == "The image was generated, and the user sees it. Its id is ig_1."
    listed = [item async for item in responses(served).input_items.list(response.id, order="asc")]
    assert listed[1].to_dict() == image


async def test_an_image_of_the_input_is_listed_with_its_detail(served: Served) -> None:
    """The SDK's type requires it."""
    url = "https://images.example/a.png"
    conversation = await served.client.conversations.create()
    parts: Any = [{"type": "input_image", "image_url": url}, {"type": "input_image", "image_url": url, "detail": "low"}]
    added = await served.client.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": parts}]
    )
    listed: Any = added.data[0]
    assert [type(part).__name__ for part in listed.content] == ["ResponseInputImage"] * 2
    assert [part.detail for part in listed.content] == ["auto", "low"]


async def test_an_unreadable_compaction_before_everything_else_is_an_error(served: Served) -> None:
    """No answer without its past."""
    item = {"type": "compaction", "id": "cmp_theirs", "encrypted_content": "gAAAAABfromElsewhere"}
    error = await refusal(served, input=[item, {"role": "user", "content": "And now?"}])
    assert (error["param"], error["code"]) == ("input[0].encrypted_content", "invalid_encrypted_content")
    assert "cmp_theirs" in error["message"]


async def test_a_schema_of_the_text_is_echoed_with_all_its_fields() -> None:
    """`description` and `strict` are always there; in the Open Responses dialect the schema is null."""
    script = [[{"text": "{}"}]]
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    async with serving({"provider": "scripted", "turns": script}) as served:
        for headers, schema in ((None, {"type": "object"}), ({"x-responses-dialect": "open-responses"}, None)):
            raw = await responses(served).with_raw_response.create(
                model="scripted", input="hi", text=text, extra_headers=headers
            )
            body: Json = raw.http_response.json()
            echoed = {"type": "json_schema", "name": "n", "description": None, "schema": schema, "strict": False}
            assert body["text"]["format"] == echoed


async def test_the_effort_that_was_used_is_echoed() -> None:
    """Harmony has three, and medium is the default."""
    function_path = "tests.support.models.token_functions:plain"
    async with serving({"provider": "next_token", "function": function_path, "model": "next-token"}) as served:
        for requested, used in ((None, "medium"), ("minimal", "low"), ("high", "high"), ("max", "high")):
            fields: Json = {} if requested is None else {"reasoning": {"effort": requested}}
            assert (await create(served, model="next-token", **fields)).reasoning.effort == used


async def test_the_tokens_of_the_only_model_are_counted_without_its_name(served: Served) -> None:
    """The SDK's count takes no model."""
    named = await responses(served).input_tokens.count(model="scripted", input="one two")
    assert await responses(served).input_tokens.count(input="one two") == named
