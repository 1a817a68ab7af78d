"""/openapi.json: who may read it, and that what the official SDK sends is what it says."""

import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast
from urllib.parse import parse_qsl

import httpx2
import jsonschema_rs
import pytest
from openai import APIStatusError, AsyncOpenAI

from stack.http.routes.table import API_ROUTES
from tests.stack.http.raw import ask, check_error
from tests.support.models.images import PIXEL_URL
from tests.support.sdk.administration_calls import ADMINISTRATION_CALLS, WEBHOOK_CALLS
from tests.support.servers.serving import serving

FUNCTION: Any = {
    "type": "function",
    "name": "f",
    "description": "d",
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
CHAT_FUNCTION: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PIXEL = PIXEL_URL
ITEMS: list[Any] = [
    {"role": "developer", "content": "be kind"},
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "hi"},
            {"type": "input_image", "image_url": PIXEL, "detail": "low"},
            {"type": "input_file", "file_id": "file-1"},
        ],
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "hello", "annotations": []}],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "1"}]},
    {"type": "item_reference", "id": "msg_2"},
]


async def respond(client: AsyncOpenAI) -> None:
    create: Any = client.responses.create
    await create(
        model="m",
        input=ITEMS,
        instructions="i",
        tools=[
            FUNCTION,
            {"type": "web_search", "filters": {"allowed_domains": ["example.com"]}, "search_context_size": "low"},
            {"type": "file_search", "vector_store_ids": ["vs_1"], "max_num_results": 3},
            {"type": "code_interpreter", "container": {"type": "auto"}},
            {"type": "mcp", "server_label": "s", "server_url": "https://example.com/mcp", "require_approval": "never"},
            {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
        ],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        metadata={"k": "v"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        stream=True,
        store=False,
        truncation="auto",
    )


EXPIRY: Any = {"anchor": "created_at", "seconds": 3600}
NO_ENVIRONMENT: Any = {"type": "none"}
AUTOMATION_TARGET: Any = {"type": "existing_session", "session_id": "sess_1", "instructions": "Go on."}
CALLS: dict[str, Callable[[AsyncOpenAI], Awaitable[Any]]] = {
    "agents.create": lambda c: c.beta.agents.create(model="m", instructions="i", metadata={"a": "b"}),
    "agents.list": lambda c: c.beta.agents.list(limit=2),
    "agents.retrieve": lambda c: c.beta.agents.retrieve("agent_1"),
    "agents.update": lambda c: c.beta.agents.update("agent_1", name=None),
    "agents.delete": lambda c: c.beta.agents.delete("agent_1"),
    "sessions.create": lambda c: c.beta.agents.sessions.create(
        agent_id="agent_1", environment=NO_ENVIRONMENT, input="hi"
    ),
    "sessions.list": lambda c: c.beta.agents.sessions.list(agent_id="agent_1"),
    "sessions.retrieve": lambda c: c.beta.agents.sessions.retrieve("sess_1"),
    "sessions.update": lambda c: c.beta.agents.sessions.update("sess_1", metadata={}),
    "sessions.delete": lambda c: c.beta.agents.sessions.delete("sess_1"),
    "sessions.events.create": lambda c: c.beta.agents.sessions.events.create(
        "sess_1", events=[{"type": "agent.session.input.cancel"}]
    ),
    "sessions.events.stream": lambda c: c.beta.agents.sessions.events.stream("sess_1"),
    "sessions.items.list": lambda c: c.beta.agents.sessions.items.list("sess_1"),
    "sessions.turns.list": lambda c: c.beta.agents.sessions.turns.list("sess_1"),
    "sessions.turns.retrieve": lambda c: c.beta.agents.sessions.turns.retrieve("turn_1", session_id="sess_1"),
    "sessions.subagents.list": lambda c: c.beta.agents.sessions.subagents.list("sess_1"),
    "sessions.subagents.retrieve": lambda c: c.beta.agents.sessions.subagents.retrieve("s_1", session_id="sess_1"),
    "sessions.subagents.items": lambda c: c.beta.agents.sessions.subagents.items.list("s_1", session_id="sess_1"),
    "sessions.subagents.turns": lambda c: c.beta.agents.sessions.subagents.turns.list("s_1", session_id="sess_1"),
    "sessions.subagents.turn": lambda c: c.beta.agents.sessions.subagents.turns.retrieve(
        "turn_1", session_id="sess_1", subagent_id="s_1"
    ),
    "sessions.subagents.turn.items": lambda c: c.beta.agents.sessions.subagents.turns.items.list(
        "turn_1", session_id="sess_1", subagent_id="s_1"
    ),
    "sessions.turns.items": lambda c: c.beta.agents.sessions.turns.items.list("turn_1", session_id="sess_1"),
    "vaults.create": lambda c: c.beta.agents.vaults.create(name="n", metadata={"a": "b"}),
    "vaults.list": lambda c: c.beta.agents.vaults.list(status="active", metadata={"a": "b"}),
    "vaults.retrieve": lambda c: c.beta.agents.vaults.retrieve("vault_1"),
    "vaults.update": lambda c: c.beta.agents.vaults.update("vault_1", name=None),
    "vaults.delete": lambda c: c.beta.agents.vaults.delete("vault_1"),
    "vaults.credentials.create": lambda c: c.beta.agents.vaults.credentials.create(
        "vault_1",
        name="n",
        auth={"type": "static_bearer", "mcp_server_url": "https://a.example", "token": "t"},
    ),
    "vaults.credentials.list": lambda c: c.beta.agents.vaults.credentials.list("vault_1", limit=2),
    "vaults.credentials.retrieve": lambda c: c.beta.agents.vaults.credentials.retrieve("vcred_1", vault_id="vault_1"),
    "vaults.credentials.update": lambda c: c.beta.agents.vaults.credentials.update(
        "vcred_1", vault_id="vault_1", auth={"type": "static_bearer", "token": "t"}
    ),
    "vaults.credentials.delete": lambda c: c.beta.agents.vaults.credentials.delete("vcred_1", vault_id="vault_1"),
    "environments.create": lambda c: c.beta.agents.environments.create(environment={"type": "openai_hosted"}),
    "environments.list": lambda c: c.beta.agents.environments.list(limit=2),
    "environments.retrieve": lambda c: c.beta.agents.environments.retrieve("env_1"),
    "templates.create": lambda c: c.beta.agents.environments.templates.create(name="a", env={"A": "1"}),
    "templates.list": lambda c: c.beta.agents.environments.templates.list(limit=2),
    "templates.retrieve": lambda c: c.beta.agents.environments.templates.retrieve("envtmpl_1"),
    "templates.update": lambda c: c.beta.agents.environments.templates.update("envtmpl_1", name=None),
    "templates.delete": lambda c: c.beta.agents.environments.templates.delete("envtmpl_1"),
    "environments.files.create": lambda c: c.beta.agents.environments.files.create(
        "env_1", type="inline", data="aGk=", path="/workspace/a"
    ),
    "environments.files.list": lambda c: c.beta.agents.environments.files.list("env_1", limit=2),
    "artifacts.list": lambda c: c.beta.agents.sessions.artifacts.list("sess_1", environment_id="env_1"),
    "artifacts.retrieve": lambda c: c.beta.agents.sessions.artifacts.retrieve("artifact_1", session_id="sess_1"),
    "artifacts.content": lambda c: c.beta.agents.sessions.artifacts.content("artifact_1", session_id="sess_1"),
    "artifacts.delete": lambda c: c.beta.agents.sessions.artifacts.delete("artifact_1", session_id="sess_1"),
    "automations.create": lambda c: c.beta.agents.automations.create(
        type="periodic", name="n", expression="0 8 * * *", timezone="UTC", target=AUTOMATION_TARGET, metadata={}
    ),
    "automations.list": lambda c: c.beta.agents.automations.list(session_id="sess_1"),
    "automations.retrieve": lambda c: c.beta.agents.automations.retrieve("automation_1"),
    "automations.update": lambda c: c.beta.agents.automations.update("automation_1", run_at=2_000_000_000),
    "automations.delete": lambda c: c.beta.agents.automations.delete("automation_1"),
    "automations.pause": lambda c: c.beta.agents.automations.pause("automation_1"),
    "automations.resume": lambda c: c.beta.agents.automations.resume("automation_1"),
    "automations.invoke": lambda c: c.beta.agents.automations.invocations.create("automation_1"),
    "invocations.list": lambda c: c.beta.agents.automations.invocations.list("automation_1"),
    "invocations.retrieve": lambda c: c.beta.agents.automations.invocations.retrieve(
        "invocation_1", automation_id="automation_1"
    ),
    **ADMINISTRATION_CALLS,
    **WEBHOOK_CALLS,
    "create a response": respond,
    "create from text": lambda client: client.responses.create(model="m", input="hi", previous_response_id="resp_1"),
    "parse": lambda client: client.responses.parse(model="m", input="hi", conversation="conv_1", background=True),
    "retrieve a response": lambda client: client.responses.retrieve("resp_1"),
    "follow a response": lambda client: client.responses.retrieve("resp_1", stream=True, starting_after=3),
    "delete a response": lambda client: client.responses.delete("resp_1"),
    "cancel a response": lambda client: client.responses.cancel("resp_1"),
    "compact": lambda client: client.responses.compact(model="m", input=ITEMS),
    "count tokens": lambda client: client.responses.input_tokens.count(model="m", input=ITEMS, tools=[FUNCTION]),
    "list input items": lambda client: client.responses.input_items.list("resp_1", limit=3, order="asc", after="msg_1"),
    "complete": lambda client: client.completions.create(model="m", prompt=["a", "b"], max_tokens=3, echo=True, n=2),
    "chat": lambda client: cast(Any, client.chat.completions.create)(
        model="m",
        messages=[
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
            },
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        tools=[CHAT_FUNCTION],
        tool_choice="auto",
        response_format={"type": "json_object"},
        stop=["x"],
        seed=1,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    ),
    "draw": lambda client: client.images.generate(prompt="A cat.", n=2, size="512x512"),
    "edit an image": lambda client: client.images.edit(image=b"x", mask=b"y", prompt="A hat.", n=2),
    "transcribe": lambda client: client.audio.transcriptions.create(
        model="m", file=b"x", timestamp_granularities=["word"], response_format="verbose_json"
    ),
    "moderate": lambda client: client.moderations.create(model="m", input=["a", "b"]),
    "embed": lambda client: client.embeddings.create(model="m", input=["a", "b"], dimensions=8),
    "decide": lambda client: client.decisions.create(
        model="m",
        input=[
            {"role": "developer", "content": "Be strict."},
            {"role": "user", "content": [{"type": "input_json", "data": {"a": [1]}}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
        questions=[
            {"type": "predicate", "instructions": "True?", "name": "p"},
            {"type": "choice", "instructions": "Which?", "choices": [{"value": True}, {"value": "b"}]},
            {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}]},
        ],
        prompt_cache_options={"ttl": "30m"},
    ),
    "list models": lambda client: client.models.list(),
    "retrieve a model": lambda client: client.models.retrieve("m"),
    "create a conversation": lambda client: client.conversations.create(items=ITEMS[:2], metadata={"k": "v"}),
    "retrieve a conversation": lambda client: client.conversations.retrieve("conv_1"),
    "update a conversation": lambda client: client.conversations.update("conv_1", metadata={"k": "w"}),
    "delete a conversation": lambda client: client.conversations.delete("conv_1"),
    "add items": lambda client: client.conversations.items.create("conv_1", items=ITEMS[:1]),
    "list items": lambda client: client.conversations.items.list("conv_1", limit=5, order="desc"),
    "retrieve an item": lambda client: client.conversations.items.retrieve("msg_1", conversation_id="conv_1"),
    "delete an item": lambda client: client.conversations.items.delete("msg_1", conversation_id="conv_1"),
    "upload": lambda client: client.files.create(file=("a.txt", b"a"), purpose="assistants"),
    "store a skill": lambda client: client.skills.create(files=("skill.zip", b"PK")),
    "list skills": lambda client: client.skills.list(limit=2, order="asc", after="skill_1"),
    "read a skill": lambda client: client.skills.retrieve("skill_1"),
    "choose a skill's default": lambda client: client.skills.update("skill_1", default_version="2"),
    "delete a skill": lambda client: client.skills.delete("skill_1"),
    "load a skill": lambda client: client.skills.content.retrieve("skill_1"),
    "store a version": lambda client: client.skills.versions.create("skill_1", files=("skill.zip", b"PK")),
    "list versions": lambda client: client.skills.versions.list("skill_1", limit=2, order="asc", after="skillver_1"),
    "read a version": lambda client: client.skills.versions.retrieve("latest", skill_id="skill_1"),
    "delete a version": lambda client: client.skills.versions.delete("1", skill_id="skill_1"),
    "load a version": lambda client: client.skills.versions.content.retrieve("1", skill_id="skill_1"),
    "begin an upload": lambda client: client.uploads.create(
        bytes=1, filename="a", mime_type="text/plain", purpose="batch", expires_after=EXPIRY
    ),
    "add a part": lambda client: client.uploads.parts.create("upload_1", data=b"a"),
    "complete an upload": lambda client: client.uploads.complete("upload_1", part_ids=["part_1"], md5="0" * 32),
    "cancel an upload": lambda client: client.uploads.cancel("upload_1"),
    "create a batch of requests": lambda client: client.batches.create(
        input_file_id="file-1",
        endpoint="/v1/responses",
        completion_window="24h",
        metadata={"k": "v"},
        output_expires_after=EXPIRY,
    ),
    "retrieve a batch of requests": lambda client: client.batches.retrieve("batch_1"),
    "list batches": lambda client: client.batches.list(after="batch_1", limit=3),
    "cancel a batch of requests": lambda client: client.batches.cancel("batch_1"),
    "upload for a time": lambda client: client.files.create(
        file=("a.txt", b"a"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    ),
    "list files": lambda client: client.files.list(purpose="assistants", limit=10, order="asc"),
    "retrieve a file": lambda client: client.files.retrieve("file-1"),
    "download a file": lambda client: client.files.content("file-1"),
    "delete a file": lambda client: client.files.delete("file-1"),
    "create a store": lambda client: client.vector_stores.create(
        name="n",
        file_ids=["file-1"],
        expires_after={"anchor": "last_active_at", "days": 3},
        chunking_strategy={
            "type": "static",
            "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400},
        },
    ),
    "list stores": lambda client: client.vector_stores.list(limit=2, before="vs_1"),
    "retrieve a store": lambda client: client.vector_stores.retrieve("vs_1"),
    "update a store": lambda client: client.vector_stores.update("vs_1", name="m", metadata={"k": "v"}),
    "delete a store": lambda client: client.vector_stores.delete("vs_1"),
    "search a store": lambda client: client.vector_stores.search(
        "vs_1",
        query=["a", "b"],
        filters={"type": "and", "filters": [{"type": "eq", "key": "k", "value": 1}]},
        max_num_results=3,
        ranking_options={"score_threshold": 0.2},
        rewrite_query=False,
    ),
    "add a file": lambda client: client.vector_stores.files.create("vs_1", file_id="file-1", attributes={"k": 1}),
    "list a store's files": lambda client: client.vector_stores.files.list("vs_1", filter="completed", limit=5),
    "retrieve a store's file": lambda client: client.vector_stores.files.retrieve("file-1", vector_store_id="vs_1"),
    "update a store's file": lambda client: client.vector_stores.files.update(
        "file-1", vector_store_id="vs_1", attributes={"k": "v"}
    ),
    "remove a store's file": lambda client: client.vector_stores.files.delete("file-1", vector_store_id="vs_1"),
    "read a store's file": lambda client: client.vector_stores.files.content("file-1", vector_store_id="vs_1"),
    "create a batch": lambda client: client.vector_stores.file_batches.create("vs_1", file_ids=["file-1"]),
    "retrieve a batch": lambda client: client.vector_stores.file_batches.retrieve("b", vector_store_id="vs_1"),
    "cancel a batch": lambda client: client.vector_stores.file_batches.cancel("b", vector_store_id="vs_1"),
    "list a batch": lambda client: client.vector_stores.file_batches.list_files("b", vector_store_id="vs_1"),
    "create a container": lambda client: client.containers.create(
        name="n", file_ids=["file-1"], expires_after={"anchor": "last_active_at", "minutes": 5}, memory_limit="1g"
    ),
    "list containers": lambda client: client.containers.list(limit=3, order="asc"),
    "retrieve a container": lambda client: client.containers.retrieve("cntr_1"),
    "delete a container": lambda client: client.containers.delete("cntr_1"),
    "copy a file to a container": lambda client: client.containers.files.create("cntr_1", file_id="file-1"),
    "upload to a container": lambda client: client.containers.files.create("cntr_1", file=("a.txt", b"a")),
    "list a container's files": lambda client: client.containers.files.list("cntr_1", limit=3),
    "retrieve a container's file": lambda client: client.containers.files.retrieve("cf_1", container_id="cntr_1"),
    "delete a container's file": lambda client: client.containers.files.delete("cf_1", container_id="cntr_1"),
    "read a container's file": lambda client: client.containers.files.content.retrieve("cf_1", container_id="cntr_1"),
}


async def read_document(**server: Any) -> dict[str, Any]:
    async with serving(server=server) as served:
        answer = await ask(served.url, method="GET", path="/openapi.json", kind=None)
    assert answer.status == 200
    return answer.json


async def record_requests(call: Callable[[AsyncOpenAI], Awaitable[Any]]) -> list[httpx2.Request]:
    requests: list[httpx2.Request] = []

    async def refuse(request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        requests.append(request)
        return httpx2.Response(400, json={"error": {"message": "recorded"}})

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(refuse)) as http:
        client = AsyncOpenAI(base_url="http://stack/v1", api_key="none", max_retries=0, http_client=http)
        with suppress(APIStatusError):
            pages = await call(client)
            with suppress(TypeError):
                await pages
    return requests


class Document:
    """An OpenAPI document against which requests are held."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._paths = {
            re.compile(re.sub(r"{\w+}", "[^/]+", path)): operations for path, operations in document["paths"].items()
        }

    def validate(self, schema: dict[str, Any], value: Any) -> None:
        jsonschema_rs.validator_for({**schema, "components": self._document["components"]}).validate(value)

    def check(self, method: str, path: str, query: dict[str, str], kind: str, body: bytes) -> None:
        """Raise for a request that the document does not describe."""
        matches = [operations for pattern, operations in self._paths.items() if pattern.fullmatch(path)]
        operation = next(operations[method.lower()] for operations in matches if method.lower() in operations)
        parameters = {each["name"]: each["schema"] for each in operation.get("parameters", ()) if each["in"] == "query"}
        for name, text in query.items():
            value: Any = text
            with suppress(ValueError):
                value = json.loads(text)
            base, bracket, inner = name.removesuffix("]").partition("[")
            self.validate(parameters[base], {inner: value} if inner else [value] if bracket else value)
        if kind.startswith("multipart/form-data"):
            schema = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
            names = {name.decode() for name in re.findall(rb' name="([a-z_]+)[\["]', body)}
            assert set(schema["required"]) <= names <= schema["properties"].keys()
        elif body and body != b"{}":
            self.validate(operation["requestBody"]["content"]["application/json"]["schema"], json.loads(body))


async def test_every_request_of_the_sdk_is_one_that_the_document_describes() -> None:
    document = await read_document()
    checker = Document(document)
    called: set[tuple[str, str]] = set()
    for name, call in CALLS.items():
        requests = await record_requests(call)
        assert requests, name
        for sent in requests:
            path = sent.url.path
            try:
                checker.check(
                    sent.method,
                    path,
                    dict(parse_qsl(sent.url.query.decode())),
                    sent.headers.get("content-type", ""),
                    sent.content,
                )
            except Exception as exc:
                raise AssertionError(f"{name}: {sent.method} {path}: {exc}") from exc
            for pattern, operations in document["paths"].items():
                if re.fullmatch(re.sub(r"{\w+}", "[^/]+", pattern), path) and sent.method.lower() in operations:
                    called.add((sent.method, pattern))
    routes = {(route.method, re.sub(r":\w+}", "}", f"/v1{route.path}")) for route in API_ROUTES}
    assert routes <= called


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": 5, "input": "hi"}),
        ("/v1/responses", {"model": "m", "input": "hi", "temperature": "warm"}),
        ("/v1/responses", {"model": "m", "input": [{"type": "unheard_of"}]}),
        ("/v1/chat/completions", {"model": "m"}),
        ("/v1/vector_stores/{store_id}/files", {}),
    ],
)
async def test_a_request_that_is_refused_is_none_that_the_document_describes(path: str, body: dict[str, Any]) -> None:
    document = await read_document()
    with pytest.raises(jsonschema_rs.ValidationError):
        Document(document).validate(
            document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"], body
        )


async def test_the_document_names_every_route_each_operation_by_an_id_of_its_own() -> None:
    document = await read_document()
    assert document["openapi"].startswith("3.1")
    assert {"/healthz", "/readyz", "/version", "/metrics", "/openapi.json"} <= document["paths"].keys()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) > len([*API_ROUTES])
    assert not any("422" in operation["responses"] for operation in operations)
    for schema in document["components"]["schemas"].values():
        assert jsonschema_rs.meta.is_valid(schema)


async def test_the_document_of_a_server_without_metrics_is_the_same_but_for_them() -> None:
    document, without = await read_document(), await read_document(metrics="closed")
    assert document["paths"].pop("/metrics")
    assert without == document


async def test_the_document_is_read_by_whom_the_version_is_read() -> None:
    async with serving(server={"api_keys": ["sk-one"]}) as served:
        check_error(await ask(served.url, method="GET", path="/openapi.json", kind=None), 401)
        key = [("authorization", "Bearer sk-one")]
        answer = await ask(served.url, method="GET", path="/openapi.json", headers=key, kind=None)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
