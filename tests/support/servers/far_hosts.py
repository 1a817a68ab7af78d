"""Two programs for two network namespaces: hosts with public addresses and a canary with private ones, and a stack that
browses them."""

import asyncio
import json
import sys
from typing import Any, Final

from aiohttp import web

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import bare, create, messages
from tests.support.servers.fake_exa import KEY, FakeExa, page
from tests.support.servers.serving import scripted, serving

STACK: Final = "93.184.215.2"
HOSTS: Final = ("93.184.215.14", "93.184.215.15", "93.184.215.16")
CANARIES: Final = ("10.9.8.7", "169.254.169.254")
FIRST, SECOND, THIRD = (f"http://{host}" for host in HOSTS)
LEADS: Final = {
    (HOSTS[0], "/far"): f"{SECOND}/far",
    (HOSTS[1], "/far"): f"{THIRD}/end",
    (HOSTS[0], "/trap"): f"{SECOND}/trap",
    (HOSTS[1], "/trap"): f"http://{CANARIES[0]}/secret",
    (HOSTS[2], "/trap"): f"http://{CANARIES[1]}/latest/meta-data",
}
"""Where hosts redirect."""
OPENED: Final = (
    f"{FIRST}/start",
    f"{FIRST}/far",
    f"{FIRST}/trap",
    f"{THIRD}/trap",
    f"http://{CANARIES[0]}/secret",
    f"http://{CANARIES[1]}/latest/meta-data",
)


async def host() -> None:
    """Serve until the input ends; then say who came."""
    requests: list[str] = []
    canaries = 0

    async def answer(request: web.Request) -> web.Response:
        requests.append(str(request.url))
        lead = LEADS.get((request.host, request.path))
        if lead is not None:
            return web.Response(status=302, headers={"Location": lead})
        body = f"<title>{request.path}</title><p>On {request.host} <a href='{SECOND}/far'>more</a>.</p>"
        return web.Response(text=body, content_type="text/html")

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal canaries
        canaries += 1
        writer.close()

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for address in HOSTS:
        await web.TCPSite(runner, address, 80).start()
    servers = [await asyncio.start_server(count, address, 80) for address in CANARIES]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps({"requests": requests, "canaries": canaries}), flush=True)
    for server in servers:
        server.close()
    await runner.cleanup()


async def browse() -> None:
    """Let a model open all pages through a stack; say what came of it, and show that the canaries can be reached."""
    turns: Any = [[call("web_search", '{"query": "far"}')]]
    turns += [[call("open_page", json.dumps({"page": url}))] for url in OPENED]
    turns.append([{"text": "It is far【2】."}])
    async with FakeExa() as exa:
        exa.results = [page(1, url=f"{FIRST}/start")]
        search = {"provider": "exa", "api_key": KEY, "base_url": exa.url}
        members = {"search": search, "pages": {"provider": "browser"}}
        runtime = {"provider": "toolbox", "providers": members}
        async with serving(scripted(*turns), tool_runtime=runtime) as served:
            response = await create(served, tools=[{"type": "web_search"}])
            sent_results = [each["content"] for each in messages(served) if each["role"] == "tool"]
    for address in CANARIES:
        async with asyncio.timeout(5):
            _, writer = await asyncio.open_connection(address, 80)
        writer.close()
    print(json.dumps({"output": [bare(item) for item in response.output], "told": sent_results}), flush=True)


if __name__ == "__main__":
    asyncio.run(host() if sys.argv[1] == "host" else browse())
