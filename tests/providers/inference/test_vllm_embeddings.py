"""VLLM's embeddings: how it asks, what it accepts, and every way in which an answer can be wrong."""

import base64
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    RateLimited,
    StackError,
    Unsupported,
    UpstreamError,
    UpstreamTimeout,
)
from providers.inference.router import Router
from providers.inference.vllm import VLLM
from tests.conformance.embeddings import LAWS, Law, Subject
from tests.providers.inference.remote import started
from tests.support.servers.upstream_server import (
    CUT,
    HANG,
    Answer,
    Received,
    UpstreamServer,
    error_answer,
    json_answer,
    plain_answer,
)

PATH = "/v1/embeddings"


def embedding_request(inputs: Any = "hi", **fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate({"model": "fake-model", "input": inputs, **fields})


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def answer(*vectors: Any, indexes: Sequence[int] | None = None, **fields: Any) -> Answer:
    at = indexes or range(len(vectors))
    data = [{"object": "embedding", "index": i, "embedding": each} for i, each in zip(at, vectors, strict=True)]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    return json_answer({"object": "list", "data": data, "model": "m", "usage": usage, **fields})


def server_of_letters(request: Received) -> Answer:
    """A vector is made of its text's letters; a token is a word."""
    if request.json["model"] != "fake-model":
        return error_answer(404, "The model does not exist.")
    inputs = request.json["input"]
    texts = [inputs] if isinstance(inputs, str) else inputs
    vectors = [[float(text.count(letter)) + 0.5 for letter in "acekmst0123456789"] for text in texts]
    words = sum(len(text.split()) for text in texts)
    return answer(*(packed(*vector) for vector in vectors), usage={"prompt_tokens": words})


async def embedded(upstream: UpstreamServer, request: EmbeddingRequest, **fields: Any) -> Embeddings:
    async with started(upstream.base_url, **fields) as vllm:
        return await vllm.embed(request)


async def failure(reply: Answer, request: EmbeddingRequest | None = None, **fields: Any) -> StackError:
    async with UpstreamServer() as upstream:
        upstream.routes[PATH] = reply
        with pytest.raises(StackError) as caught:
            await embedded(upstream, request or embedding_request(), **{"max_retries": 0, **fields})
    return caught.value


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_vllm_embeddings_conform(law: Law, routed: bool) -> None:
    async with UpstreamServer() as upstream, started(upstream.base_url) as vllm:
        upstream.routes[PATH] = server_of_letters
        router = Router(Router.Config(providers={"far": {}}, aliases={"other-name": "fake-model"}), {"far": vllm})
        await law(Subject(router if routed else vllm, "other-name" if routed else "fake-model"))


async def test_a_request_reaches_the_server_unchanged() -> None:
    async with UpstreamServer() as upstream:
        upstream.routes[PATH] = answer(packed(1, 2))
        request = embedding_request("hi", dimensions=2, user="u1", encoding_format="float")
        embeddings = await embedded(upstream, request, api_key="sk-1", extra_body={"only": "chats"})
        (received,) = upstream.received
    assert (received.method, received.path) == ("POST", PATH)
    assert received.headers["authorization"] == "Bearer sk-1"
    assert received.json == {
        "model": "fake-model",
        "input": "hi",
        "dimensions": 2,
        "user": "u1",
        "encoding_format": "base64",
    }
    assert [vector.tolist() for vector in embeddings.vectors] == [[1, 2]]
    assert embeddings.input_tokens == 3


@pytest.mark.parametrize("inputs", [[1, 2, 3], [[1, 2], [3]]])
async def test_token_ids_go_as_they_came(inputs: Any) -> None:
    request = embedding_request(inputs)
    async with UpstreamServer() as upstream:
        upstream.routes[PATH] = answer(*[[0.5]] * len(request.inputs))
        await embedded(upstream, request)
        assert upstream.received[0].json["input"] == inputs


async def test_digits_in_any_order_are_understood() -> None:
    async with UpstreamServer() as upstream:
        upstream.routes[PATH] = answer([1, 2.5], packed(3, 4), indexes=[1, 0])
        embeddings = await embedded(upstream, embedding_request(["a", "b"]))
    assert [vector.tolist() for vector in embeddings.vectors] == [[3, 4], [1, 2.5]]


async def test_many_inputs_go_in_parts() -> None:
    texts = [f"{'cat ' * (number % 5)}{number}" for number in range(100)]
    async with UpstreamServer() as upstream:
        upstream.routes[PATH] = server_of_letters
        embeddings = await embedded(upstream, embedding_request(texts))
        assert [text for each in upstream.received for text in each.json["input"]] == texts
        assert max(len(each.json["input"]) for each in upstream.received) == 32
    assert len(embeddings.vectors) == 100
    assert embeddings.input_tokens == sum(len(text.split()) for text in texts)


NAN, INFINITE = float("nan"), float("inf")
WRONG: dict[str, tuple[Answer, EmbeddingRequest]] = {
    "no JSON": (plain_answer(b"<html>"), embedding_request()),
    "no data": (json_answer({"object": "list"}), embedding_request()),
    "too few": (answer([1.0]), embedding_request(["a", "b"])),
    "too many": (answer([1.0], [2.0]), embedding_request()),
    "one index twice": (answer([1.0], [2.0], indexes=[0, 0]), embedding_request(["a", "b"])),
    "an index of none": (answer([1.0], indexes=[7]), embedding_request()),
    "no numbers": (answer([]), embedding_request()),
    "other lengths": (answer([1.0], [1.0, 2.0]), embedding_request(["a", "b"])),
    "not what dimensions said": (answer([1.0, 2.0]), embedding_request(dimensions=3)),
    "no base64": (answer("a*b="), embedding_request()),
    "half a float": (answer("AAA="), embedding_request()),
    "not a number": (answer(packed(1, NAN)), embedding_request()),
    "infinite": (answer(packed(INFINITE, 1)), embedding_request()),
    "more than a float32": (answer([1e300]), embedding_request()),
    "a null": (answer([1.0, None]), embedding_request()),
    "cut off": ([b"HTTP/1.1 200 X\r\ncontent-length: 500\r\n\r\n{", CUT], embedding_request()),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_answer_is_never_passed_on(case: str) -> None:
    reply, request = WRONG[case]
    error = await failure(reply, request)
    assert type(error) is UpstreamError or isinstance(error, UpstreamError)
    assert error.status == 502


async def test_parts_of_other_lengths_are_an_error() -> None:
    def grows(request: Received) -> Answer:
        return answer(*[[1.0] * len(request.json["input"])] * len(request.json["input"]))

    async with UpstreamServer() as upstream:
        upstream.routes[PATH] = grows
        with pytest.raises(UpstreamError, match="different lengths"):
            await embedded(upstream, embedding_request(["a"] * 40))


@pytest.mark.parametrize(
    ("reply", "kind", "param"),
    [
        (error_answer(404, "The model `x` does not exist."), ModelNotFound, "model"),
        (json_answer({"detail": "Not Found"}, 404), Unsupported, "model"),
        (error_answer(405), Unsupported, "model"),
        (error_answer(400, "The model does not support Embeddings API"), InvalidRequest, None),
        (error_answer(400, "This model's maximum context length is 512 tokens."), ContextLengthExceeded, None),
        (error_answer(429, headers={"retry-after": "7"}), RateLimited, None),
        (error_answer(500), UpstreamError, None),
        (error_answer(401), UpstreamError, None),
    ],
)
async def test_refusals_mean_what_they_mean_for_chats(reply: Answer, kind: type[StackError], param: str | None) -> None:
    error = await failure(reply)
    assert isinstance(error, kind)
    assert error.param == param


async def test_an_echoed_key_is_not_in_the_error() -> None:
    error = await failure(error_answer(400, "bad key sk-secret"), api_key="sk-secret")
    assert "sk-secret" not in error.message


async def test_a_silent_server_is_a_timeout() -> None:
    error = await failure([HANG], headers_timeout_s=0.05)
    assert isinstance(error, UpstreamTimeout)
    assert "headers_timeout_s" in error.message


async def test_a_failure_is_tried_again() -> None:
    replies = [error_answer(503), error_answer(429), answer([1.0])]
    async with UpstreamServer() as upstream:
        upstream.routes[PATH] = lambda _: replies.pop(0)
        assert len((await embedded(upstream, embedding_request(), max_retries=2)).vectors) == 1
        assert len(upstream.received) == 3


async def test_a_replica_takes_over() -> None:
    async with UpstreamServer() as well:
        well.routes[PATH] = answer([1.0])
        async with UpstreamServer() as down:
            urls = [down.base_url, well.base_url]
        async with started(urls, health_interval_s=600) as vllm:
            for _ in range(4):
                await vllm.embed(embedding_request())
    assert len([each for each in well.received if each.path == PATH]) == 4


async def test_vllm_works_only_between_start_and_close() -> None:
    with pytest.raises(RuntimeError):
        await VLLM(VLLM.Config()).embed(embedding_request())
