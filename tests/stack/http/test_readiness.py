"""What probes are told: whether the process lives, and whether it wants work."""

import pytest

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


async def test_a_server_whose_providers_are_not_there_is_not_ready() -> None:
    async with serving() as served:
        services, served.app.state.services = served.app.state.services, None
        ready = await ask(served.url, method="GET", path="/readyz")
        assert (ready.status, ready.json) == (503, {"status": "starting"})
        served.app.state.services = services
