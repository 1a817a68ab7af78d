"""The errors of /v1/messages: typed by the official SDK, in Anthropic's form, also before a route is reached."""

import asyncio
from typing import Any

import anthropic
import pytest

from apis.errors import Overloaded, RateLimited, StackError, UpstreamError, UpstreamTimeout
from tests.stack.http.raw import KEYS, ask
from tests.support.laws.message_laws import check_message_frames
from tests.support.sdk.messages import HI, create, fail_with, messages_client, stream
from tests.support.servers.serving import scripted, serving
from tests.support.tenants.accounts import new_project, organization_of, serving_accounts
from tests.support.waiting import until

TWO_KEYS: Any = {"api_keys": KEYS}


async def test_a_key_comes_as_either_header() -> None:
    async with serving(server=TWO_KEYS) as served:
        options: list[dict[str, Any]] = [
            {"key": "sk-one"},
            {"key": None, "auth_token": "sk-two"},
            {"key": "sk-foreign", "default_headers": {"authorization": "Bearer sk-two"}},
        ]
        for fields in options:
            async with messages_client(served, **fields) as client:
                assert (await create(client)).stop_reason == "end_turn"


async def test_a_wrong_key_is_an_authentication_error_with_its_request_id() -> None:
    async with serving(server=TWO_KEYS) as served, messages_client(served, "sk-wrong") as client:
        for send in (create, stream):
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await send(client)
            body: Any = caught.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
            assert body["request_id"] == caught.value.request_id
        openai = await ask(served.url, {"model": "scripted", "input": "hi"}, headers=[("x-api-key", "sk-one")])
    assert (openai.status, openai.json["error"]["code"]) == (401, "invalid_api_key")


async def test_unknown_models_and_paths_are_not_found() -> None:
    async with serving() as served, messages_client(served) as client:
        with pytest.raises(anthropic.NotFoundError, match="'nope' does not exist"):
            await create(client, model="nope")
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.get("/v1/hologram", cast_to=object)
        body: Any = caught.value.body
        assert body["error"]["type"] == "not_found_error"
        method = await ask(served.url, method="GET", path="/v1/messages", kind=None)
        assert (method.status, method.json["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "hologram"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "computer_20250124"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "a"}]}]}, "t"),
    ],
)
async def test_a_wrong_request_is_a_bad_request_that_names_the_fault(fields: Any, words: str) -> None:
    async with serving() as served, messages_client(served) as client:
        with pytest.raises(anthropic.BadRequestError, match=words) as caught:
            await create(client, **fields)
        body: Any = caught.value.body
        assert body["error"]["type"] == "invalid_request_error"


async def test_features_of_openais_form_only_are_refused_by_name() -> None:
    files: Any = {"files": {"provider": "kv"}}
    async with serving(more=files) as served, messages_client(served) as client:
        with pytest.raises(anthropic.NotFoundError, match="'/v1/files' is not offered"):
            await client.beta.files.list()
        with pytest.raises(anthropic.NotFoundError, match="'/v1/skills' is not offered"):
            await client.beta.skills.list()
        assert (await served.client.files.list()).data == []


async def test_a_large_body_has_a_type_of_its_own() -> None:
    async with serving(server={"max_body_bytes": 1024}) as served, messages_client(served) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await create(client, [{"role": "user", "content": "x" * 2000}])
    body: Any = caught.value.body
    assert (caught.value.status_code, body["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (RateLimited("Slow down.", retry_after_s=3), anthropic.RateLimitError, "rate_limit_error"),
        (Overloaded("Too much to do."), anthropic.InternalServerError, "overloaded_error"),
        (UpstreamError("The model is gone."), anthropic.InternalServerError, "api_error"),
        (UpstreamTimeout("Too slow."), anthropic.InternalServerError, "timeout_error"),
    ],
)
@pytest.mark.parametrize("send", [create, stream])
async def test_limits_overload_and_failures_are_errors_that_clients_retry(
    error: StackError, kind: type[anthropic.APIStatusError], name: str, send: Any
) -> None:
    async with serving() as served, messages_client(served) as client:
        fail_with(served, error)
        with pytest.raises(kind) as caught:
            await send(client)
    body: Any = caught.value.body
    assert (body["error"]["type"], body["error"]["message"]) == (name, error.message)
    assert caught.value.status_code == (529 if name == "overloaded_error" else error.status)
    if error.retry_after_s:
        assert caught.value.response.headers["retry-after"] == "3"


async def test_a_full_server_is_overloaded() -> None:
    turn: Any = [{"wait_s": 1}, {"text": "late"}]
    full: Any = {"max_running": 1, "max_waiting": 0}
    async with serving(scripted(turn), server=full) as served, messages_client(served) as client:
        inference: Any = served.stack.inference
        first = asyncio.create_task(create(client))
        await until(lambda: inference.requests)
        with pytest.raises(anthropic.OverloadedError) as caught:
            await create(client)
        assert (await first).content[0].text == "late"
    assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")


async def test_the_rights_and_limits_of_a_key_hold() -> None:
    async with serving_accounts() as served:
        organization = organization_of(served.client)
        project_id, limited = await new_project(organization, {"max_requests_per_1_day": 1})
        account = await organization.projects.service_accounts.create(project_id, name="other")
        key = await organization.projects.service_accounts.api_keys.create(
            account.id, project_id=project_id, scopes=["responses", "model:other"]
        )
        async with messages_client(served, key.value) as client:
            with pytest.raises(anthropic.PermissionDeniedError) as refusal:
                await create(client)
            assert refusal.value.error_code == "model_not_allowed"
        async with messages_client(served, limited) as client:
            await create(client)
            for send in (create, stream):
                with pytest.raises(anthropic.RateLimitError) as caught:
                    await send(client)
                assert int(caught.value.response.headers["retry-after"]) > 0


async def test_a_stream_that_fails_late_ends_its_blocks_and_says_why() -> None:
    async with serving(scripted([{"text": "Hel"}, {"wait_s": 0.2}, {"fail": "gone"}])) as served:
        async with messages_client(served) as client:
            with pytest.raises(anthropic.APIStatusError, match="gone"):
                await stream(client)
        answer = await ask(
            served.url, {"model": "scripted", "max_tokens": 9, "messages": HI, "stream": True}, path="/v1/messages"
        )
    kinds = [event["type"] for event in check_message_frames(answer.body)]
    assert kinds[-3:] == ["content_block_stop", "error", "message_stop"]
