"""Embeddings as OpenAI's SDK asks for them."""

import base64
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import APIStatusError, BadRequestError, NotFoundError

from tests.stack.http.raw import ask, check_error
from tests.support.models.tiny_bert import WIDTH, write_tiny_bert
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "all-minilm-l6-v2"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Served]:
    folder: Path = write_tiny_bert(tmp_path_factory.mktemp("bert"))
    minilm = {"provider": "minilm", "model_path": str(folder), "threads": 1}
    router: dict[str, Any] = {
        "provider": "router",
        "providers": {"chat": {"provider": "scripted"}, "embeddings": minilm},
        "aliases": {"text-embedding-3-small": MODEL},
    }
    async with serving(router) as running:
        yield running


async def create(served: Served, **fields: Any) -> Any:
    embeddings: Any = served.client.embeddings
    return await embeddings.create(**{"model": MODEL, "input": "cat", **fields})


async def test_a_text_has_a_vector_and_a_count_of_tokens(served: Served) -> None:
    answer = await create(served)
    assert (answer.object, answer.model) == ("list", MODEL)
    (one,) = answer.data
    assert (one.object, one.index, len(one.embedding)) == ("embedding", 0, WIDTH)
    assert sum(number * number for number in one.embedding) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 3


async def test_many_texts_have_vectors_in_their_order(served: Served) -> None:
    texts = ["cat", "kitten", "the stock market"] * 9
    answer = await create(served, input=texts)
    assert [one.index for one in answer.data] == list(range(27))
    alone = (await create(served, input="the stock market")).data[0].embedding
    assert answer.data[26].embedding == pytest.approx(alone, abs=1e-5)


async def test_digits_and_base64_are_the_same_numbers(served: Served) -> None:
    default = (await create(served)).data[0].embedding  # the SDK asks for base64, and decodes it
    digits = (await create(served, encoding_format="float")).data[0].embedding
    coded = (await create(served, encoding_format="base64")).data[0].embedding
    assert isinstance(coded, str)
    assert [*struct.unpack(f"<{WIDTH}f", base64.b64decode(coded))] == digits
    assert default == digits


async def test_without_an_encoding_it_is_digits(served: Served) -> None:
    answer = await ask(served.url, {"model": MODEL, "input": "cat"}, path="/v1/embeddings")
    assert answer.status == 200
    assert isinstance(answer.json["data"][0]["embedding"], list)


async def test_an_alias_answers_under_its_own_name(served: Served) -> None:
    answer = await create(served, model="text-embedding-3-small")
    assert answer.model == "text-embedding-3-small"


async def test_the_model_is_listed(served: Served) -> None:
    listed = {model.id for model in (await served.client.models.list()).data}
    assert {MODEL, "scripted", "text-embedding-3-small"} <= listed
    assert (await served.client.models.retrieve(MODEL)).owned_by == "sentence-transformers"


async def test_a_model_of_embeddings_does_not_chat(served: Served) -> None:
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="cannot chat") as caught:
            await served.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=stream
            )
        assert caught.value.param == "model"
        with pytest.raises(BadRequestError, match="cannot chat") as caught:
            await served.client.responses.create(model=MODEL, input="hi", stream=stream)
        assert caught.value.param == "model"


async def test_a_model_of_chats_makes_no_embeddings(served: Served) -> None:
    with pytest.raises(BadRequestError, match="makes no embeddings") as caught:
        await create(served, model="scripted")
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_parameter")


async def test_an_unknown_model_is_not_found(served: Served) -> None:
    with pytest.raises(NotFoundError) as caught:
        await create(served, model="nobody")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize("value", [[1, 2], [[1], [2]]])
async def test_token_ids_are_refused_by_name(served: Served, value: Any) -> None:
    with pytest.raises(BadRequestError, match="token ids") as caught:
        await create(served, input=value)
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": ...}, "missing_required_parameter", "model"),
        ({"input": ...}, "missing_required_parameter", "input"),
        ({"model": ""}, "empty_string", "model"),
        ({"model": 5}, "invalid_type", "model"),
        ({"input": None}, "invalid_type", "input"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": {"text": "a"}}, "invalid_type", "input"),
        ({"input": ""}, "empty_string", "input"),
        ({"input": []}, "empty_array", "input"),
        ({"input": ["a", ""]}, "empty_string", "input[1]"),
        ({"input": ["a", 5]}, "invalid_type", "input[1]"),
        ({"input": ["a", ["b"]]}, "invalid_type", "input[1]"),
        ({"input": [1, "a"]}, "invalid_type", "input[1]"),
        ({"input": [True]}, "invalid_type", "input[0]"),
        ({"input": [1.5]}, "invalid_type", "input[0]"),
        ({"input": [-1]}, "integer_below_min_value", "input[0]"),
        ({"input": [[1], []]}, "empty_array", "input[1]"),
        ({"input": [[1], ["a"]]}, "invalid_type", "input[1][0]"),
        ({"input": ["a"] * 2049}, "array_above_max_length", "input"),
        ({"input": [1] * 8193}, "array_above_max_length", "input"),
        ({"input": "cat " * 9000}, "context_length_exceeded", "input"),
        ({"input": ["cat", "cat " * 9000]}, "context_length_exceeded", "input[1]"),
        ({"dimensions": 0}, "integer_below_min_value", "dimensions"),
        ({"dimensions": "5"}, "invalid_type", "dimensions"),
        ({"dimensions": 16}, "unsupported_value", "dimensions"),
        ({"encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"user": 5}, "invalid_type", "user"),
    ],
)
async def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], code: str, param: str) -> None:
    body = {"model": MODEL, "input": "cat", **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    answer = await ask(served.url, body, path="/v1/embeddings")
    error = check_error(answer, 400)
    assert (error["code"], error["param"]) == (code, param), error


async def test_the_route_takes_nothing_but_post(served: Served) -> None:
    with pytest.raises(APIStatusError) as caught:
        await served.client.get("/embeddings", cast_to=object)
    assert caught.value.status_code == 405
