"""Three tenants of one stack, each with a secret word in all that it says, and what may never happen between them."""

import asyncio
import json
import re
import secrets
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch, Finish, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart, Usage
from tests.support.sdk.file_search_stack import Filing
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, serving
from tests.support.tenants.operations import PAIRS, PROBES, Ids, Operation, ask

SECRETS: Final = {"a": "aardvark7391", "b": "barracuda5524", "c": "chinchilla8806"}
TENANTS: Final = tuple(SECRETS)
ID: Final = re.compile(r"\b(?!req_)[a-z]+[_-][0-9a-f]{24,}\b")
_WORD: Final = re.compile(r"[\w-]+|[^\w-]+")
_SEALED: Final = re.compile(r'"encrypted_content":"[^"]*"')
_NUMBER: Final = re.compile(r"\d{9,}(?:\.\d+)?")
_TERMINAL: Final = ("response.completed", "response.incomplete", "response.failed", "error")
_KINDS: Final = {
    "response": "response",
    "conversation": "conversation",
    "file": "file",
    "vector_store": "store",
    "container": "container",
}
SHARED_ITEM: Final = "msg_of-everybody"
"""An item's id that every tenant uses for one of its own."""


class Echoing(Filing):
    """A model that repeats all of its input, and searches or runs code where the input asks for it."""

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        self.requests.append(request)
        text = "\n".join(message.model_dump_json(exclude_none=True) for message in request.messages)
        words = _WORD.findall(text)[-1000:]  # no id is cut in two
        offered = {tool.name for tool in request.tools or ()}
        if "search!" in text and "file_search" in offered and request.messages[-1].role == "user":
            yield (ToolCallStart("call_1", "file_search"),)
            yield (ToolArgumentsDelta("call_1", '{"queries":["secret word"]}'),)
            yield (Finish("tool_calls", Usage(1, 1)),)
            return
        yield (ReasoningDelta("".join(words[:20])),)
        if "slowly!" in text:
            await asyncio.sleep(0.3)
        for start in range(0, len(words), 100):
            yield (TextDelta("".join(words[start : start + 100])),)
        yield (Finish("stop", Usage(1, 1)),)


@dataclass(frozen=True)
class Answer:
    status: int
    body: str
    requested_ids: tuple[str, ...] = ()

    def alike(self) -> tuple[int, str]:
        """Return the answer without ids and numbers: it is equal for all ids that a tenant cannot read."""
        body = self.body
        for position, identity in enumerate(self.requested_ids):
            body = body.replace(identity, f"<requested_ids {position}>")
        return self.status, _NUMBER.sub("<number>", ID.sub("<id>", _SEALED.sub("", body)))


@dataclass
class World:
    """The ids that tenants have received so far. `ask` fails as soon as one receives another's data."""

    served: Served
    http: aiohttp.ClientSession
    owners: dict[str, str] = field(default_factory=dict[str, str])
    requested_ids: dict[str, set[str]] = field(default_factory=lambda: {tenant: set[str]() for tenant in TENANTS})
    """Another's ids that a tenant has requested: an answer may repeat these."""
    steps: deque[str] = field(default_factory=lambda: deque[str](maxlen=100))
    known_ids: dict[tuple[str, str], list[tuple[str, ...]]] = field(
        default_factory=dict[tuple[str, str], list[tuple[str, ...]]]
    )
    counts: Counter[str] = field(default_factory=Counter[str])

    def of(self, tenant: str, kind: str) -> Sequence[tuple[str, ...]]:
        """The ids of that kind that the tenant has, deleted ones too."""
        return self.known_ids.get((tenant, kind), ())

    def know(self, tenant: str, kind: str, *ids: str) -> None:
        recent_ids = self.known_ids.setdefault((tenant, kind), [])
        if ids not in recent_ids:
            recent_ids.append(ids)
            del recent_ids[:-40]

    async def run(self, tenant: str, operation: Operation, ids: Ids, text: str) -> Answer:
        """Do it, as that tenant."""
        body = operation.body(ids, text) if operation.body else None
        path = operation.path.format(*ids)
        if operation.way == "socket":
            assert body is not None
            return await self.socket(tenant, body, ids)
        return await self.ask(tenant, operation.method, path, body, ids, form=operation.way == "form")

    async def ask(
        self,
        tenant: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        ids: Ids = (),
        *,
        form: bool = False,
        key: str | None = None,
    ) -> Answer:
        headers = {"Authorization": f"Bearer key-of-{tenant}"}
        if key is not None:
            headers["Idempotency-Key"] = key
        sent: dict[str, Any] = {}
        if form and body is not None:
            data = aiohttp.FormData()
            for name, value in body.items():
                data.add_field(name, value, filename=f"{value[:40]}.md" if name == "file" else None)
            sent["data"] = data
        elif body is not None:
            sent["json"] = body
        async with self.http.request(method, f"{self.served.url}/v1{path}", headers=headers, **sent) as got:
            answer = Answer(got.status, (await got.read()).decode(), tuple(ids))
            header_text = " ".join(f"{name}: {value}" for name, value in got.headers.items())
        self.check(tenant, answer, header_text)
        return answer

    async def socket(self, tenant: str, body: Mapping[str, Any], requested_ids: Ids = ()) -> Answer:
        """Ask over a WebSocket: the status is that of the handshake, or of the error."""
        url, headers = f"{self.served.url}/v1/responses", {"Authorization": f"Bearer key-of-{tenant}"}
        lines: list[str] = []
        status = 200
        async with self.http.ws_connect(url, headers=headers) as connection:
            await connection.send_json({"type": "response.create", **body})
            while not lines or not any(f'"type":"{name}"' in lines[-1] for name in _TERMINAL):
                lines.append((await connection.receive(timeout=20)).data)
        if '"type":"error"' in lines[-1]:
            status = json.loads(lines[-1])["status"]
        answer = Answer(status, "".join(f"data: {line}\n\n" for line in lines), tuple(requested_ids))
        self.check(tenant, answer, "")
        return answer

    def check(self, tenant: str, answer: Answer, headers: str) -> None:
        """Nothing of another tenant's is in the answer, but the ids that it requested. What is new is its own."""
        self.steps.append(f"{tenant} {answer.status} {answer.requested_ids} {answer.body[:100]}")
        self.counts["answers"] += 1
        self.counts["bytes"] += len(answer.body)
        self.counts[f"{answer.status // 100}xx"] += 1
        assert answer.status < 500, answer
        self.requested_ids[tenant].update(each for each in answer.requested_ids if self._is_foreign(tenant, each))
        text = headers + answer.body
        for identity in self.requested_ids[tenant]:
            text = text.replace(identity, "")
        for other, word in SECRETS.items():
            assert other == tenant or word not in text, f"{tenant} is told {other}'s word: {text}"
        for identity in set(ID.findall(text)):
            owner = self.owners.get(identity)
            assert owner in (None, tenant), f"{tenant} is told {owner}'s {identity}: {text}"
            if answer.status < 300:
                self.owners[identity] = tenant
        if answer.status < 300:
            self._learn(tenant, answer)

    def _learn(self, tenant: str, answer: Answer) -> None:
        """The ids in an answer, by what they are of."""
        if answer.body.startswith("{"):
            body: Any = json.loads(answer.body)
        elif '"type":"response.' in answer.body:
            lines = [line[6:] for line in answer.body.splitlines() if line.startswith("data: {")]
            body = json.loads(lines[-1]).get("response", {})
        else:
            return
        for each in body.get("data", [body]) if body.get("object") == "list" else [body]:
            self._learn_object(tenant, each, answer.requested_ids)

    def _learn_object(self, tenant: str, fields: Mapping[str, Any], requested_ids: Ids) -> None:
        kind, identity = fields.get("object"), fields.get("id", "")
        if kind in _KINDS and identity:
            self.know(tenant, _KINDS[kind], identity)
        elif kind == "vector_store.file":
            self.know(tenant, "store_file", fields["vector_store_id"], identity)
        elif kind in ("vector_store.file_batch", "vector_store.files_batch"):
            self.know(tenant, "batch", fields["vector_store_id"], identity)
        elif kind == "container.file":
            self.know(tenant, "container_file", fields["container_id"], identity)
        elif identity and requested_ids and requested_ids[0].startswith("conv_"):
            self.know(tenant, "conversation_item", requested_ids[0], identity)
            self.know(tenant, "item", identity)
        elif identity and requested_ids and requested_ids[0].startswith("resp_"):
            self.know(tenant, "response_item", requested_ids[0], identity)
            self.know(tenant, "item", identity)
        for item in fields.get("output", ()) if kind == "response" else ():
            self.know(tenant, "item", item["id"])

    def pairs(self, tenant: str, kind: str, other: str) -> Sequence[tuple[str, ...]]:
        """Ids of a kind that names two objects: the first this tenant's, the second the other's."""
        if kind not in PAIRS:
            return ()
        mine, theirs = self.of(tenant, PAIRS[kind][0]), self.of(other, PAIRS[kind][1]) or self.of(other, kind)
        return [(mine[-1][0], each[-1]) for each in theirs] if mine else ()

    async def foreign(self, tenant: str, operation: Operation, ids: Ids, text: str) -> None:
        """Assert that another's ids are answered like unknown ids, and that nothing changes for their owner."""
        strange = {each: unknown(each) for each in ids if self._is_foreign(tenant, each)}
        if not strange:
            return
        assert all(mine != theirs for mine, theirs in strange.items()), strange
        self.counts["foreign ids requested"] += 1
        probe = PROBES.get(operation.kind) if operation.method in ("POST", "DELETE") else None
        owner = next((self.owners[each] for each in strange if each in self.owners), None)
        watched = operation.kind not in PAIRS or len(strange) == len(ids)
        path = probe.format(*ids) if probe and owner and watched else None
        before = await self.ask(owner, "GET", path) if owner and path else None
        one = await self.run(tenant, operation, ids, text)
        other = await self.run(tenant, operation, [strange.get(each, each) for each in ids], text)
        assert one.alike() == other.alike(), f"{operation} tells {ids} from ids of nobody: {one} {other}"
        if owner and path and before:
            after = await self.ask(owner, "GET", path)
            assert after.status == before.status, f"{operation} by {tenant} changed {ids}: {before} {after}"

    def _is_foreign(self, tenant: str, identity: str) -> bool:
        owner = self.owners.get(identity)
        return any(word in identity for other, word in SECRETS.items() if other != tenant) or (
            owner is not None and owner != tenant
        )


def unknown(identity: str) -> str:
    """Return an id that does not exist, of the same form, and of the same time where it holds one."""
    for word in SECRETS.values():
        identity = identity.replace(word, "x" * len(word))
    return re.sub(r"[0-9a-f]{32}\b|(?<=_)[0-9a-f]{36,40}\b", _other_digits, identity)


def _other_digits(match: re.Match[str]) -> str:
    """For the 32 that are random; an item's number stays after them."""
    return secrets.token_hex(16) + match[0][32:]


async def settle(world: World, tenant: str, word: str) -> None:
    """One of everything for a tenant."""
    items = [{"role": "user", "content": word}, {"role": "user", "content": word, "id": f"msg_{word}0"}]
    shared = {"type": "message", "role": "user", "content": word, "id": SHARED_ITEM}
    created_conversation = await world.ask(tenant, "POST", "/conversations", {"items": items, "metadata": {"a": word}})
    conversation = json.loads(created_conversation.body)["id"]
    await world.ask(tenant, "GET", f"/conversations/{conversation}/items", ids=[conversation])
    response = await world.ask(tenant, "POST", "/responses", ask(word, input=[*items, shared], metadata={"a": word}))
    identity = json.loads(response.body)["id"]
    await world.ask(tenant, "GET", f"/responses/{identity}/input_items", ids=[identity])
    await world.ask(tenant, "POST", "/responses", ask(word, background=True, stream=True))
    upload = {"purpose": "assistants", "file": f"{word} is the secret word"}
    file = json.loads((await world.ask(tenant, "POST", "/files", upload, form=True)).body)["id"]
    store = json.loads((await world.ask(tenant, "POST", "/vector_stores", {"name": word})).body)["id"]
    await world.ask(tenant, "POST", f"/vector_stores/{store}/files", {"file_id": file}, [store, file])
    await world.ask(tenant, "POST", f"/vector_stores/{store}/file_batches", {"file_ids": [file]}, [store, file])
    container = await world.ask(tenant, "POST", "/containers", {"name": word})
    if container.status == 200:
        name = json.loads(container.body)["id"]
        await world.ask(tenant, "POST", f"/containers/{name}/files", {"file": word}, [name], form=True)
        world.know(tenant, "container_and_file", name, file)


@asynccontextmanager
async def three_tenants(folder: Path, *, code: bool) -> AsyncGenerator[World]:
    """A stack with everything in it, where `code` says containers too, and one of everything for each tenant."""
    more: dict[str, Any] = {
        "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
        "vector_stores": {"provider": "hybrid", "embedding_model": "hashing"},
    }
    async with (
        serving(
            {"provider": "tests.support.tenants.world:Echoing"},
            more=more,
            tool_runtime={"provider": "python", "timeout_s": 5, **SHARED_PYTHON} if code else None,
            responses={"background": {"poll_s": 0.05}},
            server={"api_keys": [{"key": f"key-of-{tenant}", "tenant": tenant} for tenant in TENANTS]},
        ) as served,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http,
    ):
        served.streams.check = False
        world = World(served, http)
        for tenant, word in SECRETS.items():
            await settle(world, tenant, word)
        yield world
