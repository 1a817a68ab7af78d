"""Idempotency-Key: a request sent twice is run once, by any tenant, however it ends, whichever worker answers."""

import asyncio
from typing import Any

import aiohttp
import pytest

from apis.storage.kv_store import Delete
from tests.support.laws.stream_laws import check_frames, check_stream
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import bare, chat_requests, responses
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until

SLOW = scripted([{"text": ["one ", "two "]}, {"wait_s": 0.5}, {"text": "three"}])
SOON = {"background": {"poll_s": 0.05, "lease_s": 1}}
KEYS = [{"key": f"key-of-{name}", "tenant": name} for name in ("a", "b")]
WAYS: list[dict[str, Any]] = [{}, {"stream": True}]
ANSWER = tuple[int, bytes, bool]
"""Status, body, and true if the answer is a replay."""


async def post(served: Served, key: str | None = "k", path: str = "/responses", **fields: Any) -> ANSWER:
    body = {"model": "scripted", "input": "hi", **fields} if path == "/responses" else fields
    headers = {} if key is None else {"Idempotency-Key": key}
    headers["Authorization"] = f"Bearer {served.client.api_key}"
    url = f"{served.url}/v1{path}"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.read(), answer.headers.get("Idempotent-Replayed") == "true"


async def twice(served: Served, **fields: Any) -> tuple[ANSWER, ANSWER]:
    return await post(served, **fields), await post(served, **fields)


async def test_a_key_sent_again_gets_the_same_response() -> None:
    async with serving() as served:
        first, second = await twice(served)
        assert first == (200, second[1], False)
        assert second[2]
        assert (await post(served, "other"))[1] != first[1]
        assert len(chat_requests(served)) == 2


async def test_the_sdk_sends_the_key_with_all_its_tries() -> None:
    async with serving(scripted([{"fail": "it broke"}], [{"text": "done"}])) as served:
        client: Any = served.client.with_options(max_retries=1)
        sent = {"model": "scripted", "input": "hi", "extra_headers": {"Idempotency-Key": "k"}}
        response = await client.responses.create(**sent)
        assert response.output_text == "done"
        assert bare(await client.responses.create(**sent)) == bare(response)
        assert len(chat_requests(served)) == 2


async def test_a_key_with_another_body_is_refused() -> None:
    async with serving() as served:
        await post(served)
        status, body, _ = await post(served, input="ho")
        assert status == 400
        assert b"Idempotency-Key" in body
        assert b"idempotency_key_reused" in body


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
async def test_many_who_send_it_at_once_get_one_response(fields: dict[str, Any]) -> None:
    async with serving(SLOW, responses=SOON) as served:
        answers = await asyncio.gather(*(post(served, **fields) for _ in range(8)))
        assert {status for status, _, _ in answers} == {200}
        assert sum(not replayed for _, _, replayed in answers) == 1
        ids = {body.partition(b'"id":"')[2][:37] for _, body, _ in answers}
        assert len(ids) == 1
        if not fields.get("background") or fields.get("stream"):
            assert len({body for _, body, _ in answers}) == 1
        assert len(chat_requests(served)) == 1


@pytest.mark.parametrize("background", [False, True])
async def test_a_stream_is_replayed_byte_for_byte(background: bool) -> None:
    async with serving(scripted([{"reasoning": "hm"}, {"text": ["a ", "b"]}]), responses=SOON) as served:
        first, second = await twice(served, stream=True, background=background)
        assert (first[1], second[2]) == (second[1], True)
        check_stream(check_frames(second[1]))


async def test_a_background_stream_is_followed_while_it_runs() -> None:
    turn = [{"text": "one "}, {"wait_s": 2}, {"text": "two"}]
    async with serving(scripted(turn), responses=SOON) as served:
        first = asyncio.create_task(post(served, stream=True, background=True))
        url, body = (
            f"{served.url}/v1/responses",
            {"model": "scripted", "input": "hi", "stream": True, "background": True},
        )
        async with asyncio.timeout(10), aiohttp.ClientSession() as session:
            await until(lambda: served.stack.kv_store.scan("/run/"))
            async with session.post(url, json=body, headers={"Idempotency-Key": "k"}) as answer:
                async for line in answer.content:
                    if b"one " in line:
                        break
                assert not first.done()
        assert (await first)[0] == 200


async def test_a_client_that_left_comes_back_for_its_response() -> None:
    async with serving(SLOW) as served:
        for fields in WAYS:
            leaving = asyncio.create_task(post(served, str(fields), **fields))
            await until(lambda: served.stack.kv_store.scan("/idempotency_lease/"))
            leaving.cancel()
            status, body, replayed = await post(served, str(fields), **fields)
            assert (status, replayed) == (200, True)
            assert b"three" in body
        assert len(chat_requests(served)) == 2


async def test_what_failed_may_be_tried_again() -> None:
    async with serving(scripted([{"fail": "it broke"}], [{"text": "a"}], [{"text": "b"}])) as served:
        first, second = await twice(served)
        assert (first[0], second[0], second[2]) == (502, 200, False)
        for _ in range(2):
            assert (await post(served, "bad", input=3))[0] == 400
        assert (await post(served, "bad"))[0] == 200


async def test_a_stream_that_failed_is_replayed() -> None:
    async with serving(scripted([{"text": "a"}, {"wait_s": 0.1}, {"fail": "it broke"}])) as served:
        first, second = await twice(served, stream=True)
        assert (first[1], second[2], len(chat_requests(served))) == (second[1], True, 1)


async def test_what_is_not_to_be_stored_is_done_once_and_not_kept() -> None:
    async with serving() as served:
        for fields in WAYS:
            first, second = await twice(served, key=str(fields), store=False, **fields)
            assert (first[0], second[0]) == (200, 400)
            assert b"idempotent_answer_not_kept" in second[1]
        records = await served.stack.kv_store.scan("default/")
        assert not [key for key, entry in records if b'"hi"' in entry.value or b"output" in entry.value]


async def test_what_was_deleted_is_gone_for_its_key_too() -> None:
    async with serving() as served:
        for number, fields in enumerate(WAYS):
            _, body, _ = await post(served, str(number), **fields)
            identity = body.partition(b'"id":"')[2].partition(b'"')[0].decode()
            await responses(served).delete(identity)
            assert (await post(served, str(number), **fields))[0] == 404
        assert len(chat_requests(served)) == 2
        remaining_keys = await served.stack.kv_store.scan("default/")
        assert not [key for key, entry in remaining_keys if b'"hi"' in entry.value]


async def test_tenants_and_routes_have_keys_of_their_own() -> None:
    async with serving(server={"api_keys": KEYS}) as served:
        mine = await post(served)
        assert (await post(served, path="/conversations"))[0] == 200
        async with sdk_client(served.url, "key-of-b") as client:
            theirs = await client.responses.create(model="scripted", input="hi", extra_headers={"Idempotency-Key": "k"})
        assert theirs.id.encode() not in mine[1]
        assert len(chat_requests(served)) == 2


async def test_a_conversation_is_made_once() -> None:
    async with serving() as served:
        path = "/conversations"
        answers = await asyncio.gather(*(post(served, path=path, metadata={"a": "b"}) for _ in range(5)))
        assert len({body for _, body, _ in answers}) == 1
        assert (await post(served, path=path, metadata={"a": "c"}))[0] == 400


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "é"])
async def test_what_is_no_key_is_refused(key: str) -> None:
    async with serving() as served:
        status, body, _ = await post(served, key)
    assert (status, b"Idempotency-Key" in body) == (400, True)


async def test_the_key_of_a_worker_that_died_is_free_unless_its_response_is_there() -> None:
    async with serving(responses=SOON) as served:
        kv = served.stack.kv_store
        first = await post(served, background=True)
        (key, entry) = next(each for each in await kv.scan("default/idempotency/"))
        unsaid = entry.value.replace(b',"outcome":"stored"', b"")
        await kv.put(key, unsaid)  # as it died before it could say so
        again = await post(served, background=True)
        assert again[2]
        assert again[1][:50] == first[1][:50]
        await kv.write([Delete(key)])
        dead = await post(served, "dead")
        (key, entry) = next(each for each in await kv.scan("default/idempotency/"))
        await kv.put(key, entry.value.replace(b',"outcome":"stored"', b"").replace(b"resp_", b"resp_0"))
        other = await post(served, "dead")
        assert (other[0], other[2]) == (200, False)
        assert other[1] != dead[1]


async def test_a_client_that_waits_for_too_long_is_asked_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack.http.idempotency._WAIT_S", 0.1)
    async with serving(SLOW) as served:
        first = asyncio.create_task(post(served))
        await until(lambda: served.stack.kv_store.scan("/idempotency_lease/"))
        status, body, _ = await post(served)
        assert (status, b"idempotency_key_in_use" in body) == (409, True)
        assert (await first)[0] == 200
        assert (await post(served))[2]
