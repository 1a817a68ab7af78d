"""The answers to probes: the process lives, and it is ready for work, or it is not."""

import asyncio
from collections.abc import Sequence

import pytest

from apis.errors import StoreUnavailable
from apis.storage.kv_store import Entry
from stack.http import readiness
from tests.stack.http.raw import ask
from tests.support.servers.serving import serving


async def test_probes_need_no_key() -> None:
    async with serving(server={"api_keys": ["sk-one"]}) as served:
        for path, status in (("/healthz", "ok"), ("/readyz", "ready")):
            answer = await ask(served.url, method="GET", path=path)
            assert (answer.status, answer.json) == (200, {"status": status})
            head = await ask(served.url, method="HEAD", path=path)
            assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS"])
async def test_probes_are_only_read(method: str) -> None:
    async with serving() as served:
        for path in ("/healthz", "/readyz"):
            assert (await ask(served.url, method=method, path=path)).status == 405


async def test_a_server_that_drains_lives_and_is_not_ready() -> None:
    async with serving() as served:
        served.app.state.draining = True
        assert (await ask(served.url, method="GET", path="/healthz")).status == 200
        ready = await ask(served.url, method="GET", path="/readyz")
        assert (ready.status, ready.json) == (503, {"status": "draining"})


async def test_a_server_whose_providers_are_unavailable_is_not_ready() -> None:
    async with serving() as served:
        services, served.app.state.services = served.app.state.services, None
        ready = await ask(served.url, method="GET", path="/readyz")
        assert (ready.status, ready.json) == (503, {"status": "starting"})
        served.app.state.services = services


@pytest.mark.parametrize("failure", ["fails", "hangs"])
async def test_a_server_whose_store_does_not_answer_is_not_ready(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe names the store, and reads it once a second however often it is asked."""
    monkeypatch.setattr(readiness, "_TIMEOUT_S", 0.1)
    async with serving() as served:
        reads = 0

        async def get_many(_keys: Sequence[str]) -> list[Entry | None]:
            nonlocal reads
            reads += 1
            if failure == "hangs":
                await asyncio.Event().wait()
            raise StoreUnavailable("The store cannot be reached.")

        monkeypatch.setattr(served.stack.kv_store, "get_many", get_many)
        answers = await asyncio.gather(*(ask(served.url, method="GET", path="/readyz") for _ in range(20)))
        assert {answer.status for answer in answers} == {503}
        assert {answer.json["store"] for answer in answers} == {"memory"}
        assert answers[0].json["status"] == "store_unavailable"
        assert "store" in answers[0].json["message"].lower()
        assert reads == 1
        assert (await ask(served.url, method="GET", path="/healthz")).status == 200
        monkeypatch.undo()
        async with asyncio.timeout(5):
            while (await ask(served.url, method="GET", path="/readyz")).status != 200:  # noqa: ASYNC110  # time alone lets it look again
                await asyncio.sleep(0.05)
