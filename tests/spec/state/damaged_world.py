"""A stack with one of everything for each of several projects, in one SQLite file whose records tests can damage."""

import asyncio
import io
import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.support.damage import DAMAGES, damaged_bytes, read_stored, stored_values, write_stored
from tests.support.models.skill_archives import FRONT_MATTER, pack
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import ROOT, organization_of, stored_organization

BETA: Final = "beta"
"""The project whose records are never damaged."""
OWNERS: Final = {damage: f"alpha-{damage}" for damage in DAMAGES}
"""The project whose records have each of the damages."""
PROJECTS: Final = (*OWNERS.values(), BETA)
_ID: Final = re.compile(r"(?<![a-z])(?:[a-z]+[_-])*[0-9a-f]{16,}(?:\.[0-9]+)?|(?<=/)\d{3,}(?=/|$)")


@dataclass
class World:
    """The running stack, the keys of its projects, and the ids of what each has."""

    served: Served
    database: Path
    http: aiohttp.ClientSession
    keys: dict[str, str] = field(default_factory=dict[str, str])
    ids: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict[str, str]))

    async def ask(self, project: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON of a request of a project, or of the operator."""
        sent: dict[str, Any] = {"data": body} if isinstance(body, aiohttp.FormData) else {"json": body}
        sent = sent if body is not None else {}
        headers = {"Authorization": f"Bearer {self.keys[project]}", **headers}
        async with self.http.request(method, f"{self.served.url}/v1{path}", headers=headers, **sent) as answer:
            data = await answer.read()
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(data) if is_json else data

    async def get(self, project: str, path: str) -> Any:
        """Return the JSON of a GET that succeeds."""
        status, answer = await self.ask(project, "GET", path)
        assert status == 200, (project, path, status, answer)
        return answer

    async def post(self, project: str, path: str, body: Any, **headers: str) -> Any:
        """Return the JSON of a POST that succeeds."""
        status, answer = await self.ask(project, "POST", path, body, **headers)
        assert status in (200, 201, 204), (project, path, status, answer)
        return answer


def find_families(database: Path) -> dict[str, dict[str, list[str]]]:
    """Return the keys of each record type, by the type and the project that they belong to; "" is for all projects. The
    project of a key without one is that which its value names.

    A type is the key without its ids.
    """
    families: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, value in stored_values(database).items():
        owner = next((project for project in PROJECTS if project in re.split(r"[/~]", key)), "")
        family = _ID.sub("ID", re.sub(rf"(?<![a-z]){owner}(?![a-z])", "TENANT", key) if owner else key)
        named = [project for project in PROJECTS if project.encode() in value]
        families[family][owner or (named[0] if len(named) == 1 else "")].append(key)
    return families


@asynccontextmanager
async def damaged(world: World, keys_by_damage: Mapping[str, list[str]]) -> AsyncGenerator[None]:
    """Damage the stored values while the context is entered, and restore them."""
    originals = {key: read_stored(world.database, key) for keys in keys_by_damage.values() for key in keys}
    write_stored(
        world.database,
        {
            key: damaged_bytes(original, damage)
            for damage, keys in keys_by_damage.items()
            for key in keys
            if (original := originals[key]) is not None
        },
    )
    try:
        yield
    finally:
        write_stored(world.database, {key: value for key, value in originals.items() if value is not None})


@asynccontextmanager
async def open_world(folder: Path, like: World | None = None) -> AsyncGenerator[World]:
    """Serve the stack over the file in a folder, with the projects of `like`, or with new ones."""
    stored = {
        "provider": "stored",
        "prices": {"scripted": {"input": 1, "output": 4}, "hashing": {"input": 0, "output": 0}},
    }
    more = {
        "accounts": {"provider": "chain", "providers": {"config": {"provider": "config"}, "stored": stored}},
        "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
        "vector_stores": {"provider": "hybrid", "embedding_model": "hashing", "lease_s": 0.5},
        "skills": {"provider": "kv"},
    }
    database = folder / "store.db"
    async with (
        serving(
            {"provider": "tests.support.sdk.file_search_stack:Filing", "turns": [[{"text": "hello"}]]},
            kv_store={"provider": "sqlite", "path": str(database), "survives_power_loss": False},
            more=more,
            responses={"background": {"poll_s": 0.05}},
            webhooks={"endpoints": {"private": True}},
            server={"api_keys": [ROOT]},
        ) as served,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http,
    ):
        world = World(served, database, http, {"operator": "sk-root"})
        if like is None:
            await populate(world)
        else:
            world.keys, world.ids = like.keys, like.ids
        yield world


async def populate(world: World) -> None:
    """Create the projects, and one of everything in each."""
    organization = organization_of(world.served.client)
    await organization.spend_limit.update(threshold_amount=1_000_000_00, currency="USD", interval="month")
    for project in PROJECTS:
        path = "/organization/projects"
        directory = stored_organization(world.served.stack.accounts).directory
        await directory.create_project(project, project_id=project)
        account = await world.post("operator", f"{path}/{project}/service_accounts", {"name": "app"})
        world.keys[project] = account["api_key"]["value"]
        limit = {"max_requests_per_1_minute": 100_000}
        await world.post("operator", f"{path}/{project}/rate_limits/rl-*", limit)
        await world.post("operator", f"{path}/{project}/data_retention", {"retention_type": "none"})
    await asyncio.gather(*[fill(world, project) for project in PROJECTS])


async def fill(world: World, project: str) -> None:
    """Create one of everything in a project."""
    ids = world.ids[project]
    first = await world.post(project, "/responses", {"model": "scripted", "input": "hi"})
    ids["response"] = first["id"]
    items = [{"type": "message", "role": "user", "content": "hi", "id": f"msg_of-{project}"}]
    follow = {"model": "scripted", "input": items, "previous_response_id": first["id"]}
    ids["child"] = (await world.post(project, "/responses", follow, **{"Idempotency-Key": "one"}))["id"]
    ids["fork"] = (await world.post(project, "/responses", {**follow, "input": "no"}))["id"]
    conversation = await world.post(project, "/conversations", {"items": [{"role": "user", "content": "hi"}]})
    ids["conversation"] = conversation["id"]
    await world.post(project, "/responses", {"model": "scripted", "input": "hi", "conversation": conversation["id"]})
    ids["file"] = await upload(world, project)
    announced = {"bytes": 2, "filename": "a", "mime_type": "text/plain", "purpose": "user_data"}
    await world.post(project, "/vector_stores", {"name": "second"}, **{"Idempotency-Key": "two"})
    ids["upload"] = (await world.post(project, "/uploads", announced))["id"]
    part = aiohttp.FormData()
    part.add_field("data", io.BytesIO(b"hi"), filename="a")
    await world.post(project, f"/uploads/{ids['upload']}/parts", part)
    files = {"file_ids": [ids["file"]], "expires_after": {"anchor": "last_active_at", "days": 9}}
    ids["store"] = (await world.post(project, "/vector_stores", {"name": "s", **files}))["id"]
    batch = await world.post(project, f"/vector_stores/{ids['store']}/file_batches", {"file_ids": [ids["file"]]})
    ids["file_batch"] = batch["id"]
    await settle_store(world, project)
    skill = aiohttp.FormData()
    skill.add_field("files", io.BytesIO(pack(("greeting/SKILL.md", FRONT_MATTER))), filename="skill.zip")
    ids["skill"] = (await world.post(project, "/skills", skill))["id"]
    hook = {"name": "hook", "url": "http://127.0.0.1:9/", "event_types": ["batch.completed"]}
    ids["endpoint"] = (await world.post(project, "/webhook_endpoints", hook))["id"]
    trace_id = f"trace_{abs(hash(project)) % 16**8:032x}"
    ids["trace"] = trace_id
    span = {"type": "response", "response_id": ids["response"]}
    times = {"started_at": "2026-11-22T12:00:00.000Z", "ended_at": "2026-11-22T12:01:00.000Z"}
    await world.post(
        project,
        "/traces/ingest",
        {
            "data": [
                {"object": "trace", "id": trace_id, "workflow_name": "Flow"},
                {
                    "object": "trace.span",
                    "id": f"span_{1:024x}",
                    "trace_id": trace_id,
                    "parent_id": None,
                    "span_data": span,
                    "error": None,
                    **times,
                },
            ]
        },
    )


async def upload(world: World, project: str) -> str:
    """Create a file in a project; return its id."""
    form = aiohttp.FormData()
    form.add_field("purpose", "assistants")
    form.add_field("file", io.BytesIO(b"# Whales\n\nThe blue whale eats krill."), filename="whales.md")
    return (await world.post(project, "/files", form))["id"]


async def settle_store(world: World, project: str) -> None:
    """Wait until the files of the project's store are searchable."""
    path = f"/vector_stores/{world.ids[project]['store']}"
    async with asyncio.timeout(20):
        while (await world.get(project, path))["status"] == "in_progress":  # noqa: ASYNC110 - a store sets no event
            await asyncio.sleep(0.02)


LISTS: Final = {
    "/responses": "child",
    "/conversations": "conversation",
    "/files": "file",
    "/vector_stores": "store",
    "/skills": "skill",
    "/webhook_endpoints": "endpoint",
    "/traces": "trace",
}
"""The lists of a project, and what each shows."""


async def check_beta(world: World) -> None:
    """All that BETA has can be listed, read, searched and continued, and the operator's lists and sums are whole."""
    ids = world.ids[BETA]

    async def check_list(path: str, name: str) -> None:
        assert ids[name] in [entry["id"] for entry in (await world.get(BETA, f"{path}?limit=100&order=asc"))["data"]], (
            path
        )

    async def check_search() -> None:
        search = await world.post(BETA, f"/vector_stores/{ids['store']}/search", {"query": "whale"})
        assert len(search["data"]) == 1

    async def check_response(**fields: Any) -> None:
        answer = await world.post(BETA, "/responses", {"model": "scripted", "input": "hi", **fields})
        assert answer["status"] in ("completed", "queued", "in_progress")

    await asyncio.gather(
        *[check_list(path, name) for path, name in LISTS.items()],
        *[
            world.get(BETA, path)
            for path in (
                f"/responses/{ids['child']}",
                f"/responses/{ids['child']}/input_items",
                f"/responses/{ids['child']}/tree",
                f"/conversations/{ids['conversation']}/items",
                f"/files/{ids['file']}/content",
                f"/vector_stores/{ids['store']}/files",
                f"/vector_stores/{ids['store']}/file_batches/{ids['file_batch']}",
                f"/skills/{ids['skill']}/content",
                f"/traces/{ids['trace']}",
                "/batches",
                "/models",
            )
        ],
        check_search(),
        check_response(previous_response_id=ids["child"]),
        check_response(conversation=ids["conversation"]),
    )
    await check_operator(world)


async def check_operator(world: World) -> None:
    """The lists and sums of the organization are there, with BETA in them."""
    root = "/organization"
    projects, keys, accounts, _, usage = await asyncio.gather(
        *[
            world.get("operator", f"{root}/{path.format(start=int(time.time()) - 86_400)}")
            for path in (
                "projects?limit=100",
                f"projects/{BETA}/api_keys",
                f"projects/{BETA}/service_accounts",
                "audit_logs",
                "usage/completions?start_time={start}&bucket_width=1d&limit=3&group_by[]=project_id",
            )
        ]
    )
    assert BETA in [project["id"] for project in projects["data"]]
    assert (len(keys["data"]), len(accounts["data"])) == (1, 1)
    assert BETA in json.dumps(usage)


async def check_owner(world: World, project: str, *, can_enter: bool) -> None:
    """The owner of damaged records lists what can be read; where its own key or limits are damaged, so that it cannot
    enter, that is an error with a code."""
    for path in LISTS:
        status, answer = await world.ask(project, "GET", path)
        assert status == 200 or (not can_enter and is_damage(status, answer)), (project, path, status, answer)


def is_damage(status: int, answer: Any) -> bool:
    """True for the error of a request that needs a damaged record."""
    return status == 500 and answer["error"]["code"] == "storage_corrupt"


async def check_ingestion(world: World) -> None:
    """A file that BETA adds to its store becomes searchable."""
    store = world.ids[BETA]["store"]
    await world.post(BETA, f"/vector_stores/{store}/files", {"file_id": world.ids[BETA]["file"]})
    await settle_store(world, BETA)
    counts = (await world.get(BETA, f"/vector_stores/{store}"))["file_counts"]
    assert (counts["completed"], counts["total"]) == (1, 1)
