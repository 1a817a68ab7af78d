"""Containers that reach allowed hosts, through the SDK and in the real sandbox: who may what, and where secrets are."""

import asyncio
import glob
import json
import logging
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from openai import BadRequestError

from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import create, messages, refusal, responses, stream
from tests.support.servers.container_proxy import server_context
from tests.support.servers.fetcher_hosts import SITE, Site
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.package_index import serve_npm_package, serve_wheel
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until_ended

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]

Json = dict[str, Any]
SECRET = "sk-0123456789-domain-secret"
ROTATED = "sk-9876543210-domain-secret"
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]


def has_system_pip() -> bool:
    """Return true if the Python of the sandbox has pip."""
    return bool(glob.glob("/usr/lib/python3*/*-packages/pip") + glob.glob("/usr/local/lib/python3*/*-packages/pip"))


class World:
    """A stack whose containers may reach two sites on loopback: one over TLS, one in plain."""

    def __init__(self, served: Served, plain: Site, secure: Site, folder: Path) -> None:
        self.served = served
        self.plain = plain
        self.secure = secure
        self.folder = folder

    @property
    def refusals(self) -> float:
        """The refusals of all proxies, as `/metrics` has them."""
        figures: Any = self.served.stack.providers_by_path["tool_runtime"].metrics()
        return figures.egress_refusals

    def policy(self, *domains: str, secret: str | None = None) -> Json:
        policy: Json = {"type": "allowlist", "allowed_domains": [*(domains or (SITE,))]}
        if secret is not None:
            policy["domain_secrets"] = [{"domain": SITE, "name": "API_KEY", "value": secret}]
        return policy

    def interpreter(self, *domains: str, secret: str | None = None) -> Json:
        policy = self.policy(*domains, secret=secret)
        return {"type": "code_interpreter", "container": {"type": "auto", "network_policy": policy}}

    def shell(self, *domains: str, secret: str | None = None) -> Json:
        policy = self.policy(*domains, secret=secret)
        return {"type": "shell", "environment": {"type": "container_auto", "network_policy": policy}}

    async def run(self, code: str, tool: Json, **fields: Any) -> tuple[str, Any]:
        """The output of a program that the model runs in the tool's container, and the response."""
        turns: list[Script] = [[call("python", json.dumps({"code": code}), id="c1")]]
        response = await create(self.served, input=play(*turns), tools=[tool], **fields)
        return messages(self.served)[-1]["content"], response

    async def run_command(self, command: str, tool: Json, **fields: Any) -> tuple[str, Any]:
        turns: list[Script] = [[call("shell", json.dumps({"commands": [command]}), id="c1")]]
        response = await create(self.served, input=play(*turns), tools=[tool], **fields)
        return messages(self.served)[-1]["content"], response

    async def all_kept_text(self) -> str:
        """All bytes that the store's files hold."""
        files = [path for path in self.folder.rglob("responses.db*") if path.is_file()]
        texts = [await asyncio.to_thread(path.read_bytes) for path in files]
        return b"".join(texts).decode(errors="replace")


async def echo(request: web.Request) -> web.Response:
    return web.json_response({**request.headers, "body": (await request.read()).decode(errors="replace")})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    folder = tmp_path_factory.mktemp("egress")
    context, trusted = await server_context(folder, "localhost")
    await asyncio.to_thread((folder / "trusted.pem").write_bytes, trusted)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", str(folder / "trusted.pem"))
        async with Site() as plain, Site(context) as secure:
            for site in (plain, secure):
                site.pages["/echo"] = echo
                site.page("/x", "the page", "text/plain")
            ports = [f"{host}:{site.port}" for host in (SITE, "localhost", "*.example.com") for site in (plain, secure)]
            egress = {"allowed_hosts": ports, "allowed_private_networks": [f"{SITE}/32"]}
            tool_runtime = {"provider": "python", "timeout_s": 60, "cpu_s": 60, "egress": egress, **SHARED_PYTHON}
            store = {"provider": "sqlite", "path": str(folder / "responses.db")}
            vaults = {"provider": "kv", "keys": ["a key of the run config, of 32 characters"]}
            more = {"kv_store": store, "files": {"provider": "kv"}, "vaults": vaults}
            async with serving(MODEL, tool_runtime=tool_runtime, server={"api_keys": KEYS}, more=more) as served:
                yield World(served, plain, secure, folder)


# --- who may what ----------------------------------------------------------------------------------------------------


async def test_programs_and_commands_reach_an_allowed_host_by_their_own_means(world: World) -> None:
    url, secure = f"{world.plain.url}/x", f"{world.secure.url}/x"
    tool = world.interpreter()
    for target in (url, secure):
        code = f"import urllib.request; urllib.request.urlopen({target!r}).read()"
        output, response = await world.run(code, tool)
        assert output == "b'the page'"
    declared = response.tools[0].container.network_policy
    assert (declared.type, declared.allowed_domains) == ("allowlist", [SITE])
    if shutil.which("curl") is not None:
        output, _ = await world.run_command(f"curl -sS {url}; curl -sS {secure}", world.shell())
        assert output.startswith("the pagethe page")


async def test_the_description_of_a_tool_names_the_hosts(world: World) -> None:
    for tool in (world.interpreter(secret=SECRET), world.shell(secret=SECRET)):
        await create(world.served, input=play(), tools=[tool])
        offered = (world.served.stack.inference).requests[-1].tools[0].function.description  # type: ignore[attr-defined] # of the scripted one
        assert f"programs reach these hosts alone: {SITE}." in offered
        assert f"API_KEY ({SITE})" in offered
        assert SECRET not in offered
        assert "There is no network" not in offered


async def test_a_container_is_created_with_a_network(world: World) -> None:
    containers: Any = world.served.client.containers
    container = await containers.create(name="mine", network_policy=world.policy(SITE, "*.example.com"))
    container_policy = (await containers.retrieve(container.id)).network_policy
    assert (container_policy.type, container_policy.allowed_domains) == ("allowlist", [SITE, "*.example.com"])
    code = f"import urllib.request; urllib.request.urlopen('{world.plain.url}/x').read()"
    output, _ = await world.run(code, {"type": "code_interpreter", "container": container.id})
    assert output == "b'the page'"


async def test_without_a_policy_there_is_no_network(world: World) -> None:
    code = f"import urllib.request; urllib.request.urlopen('{world.plain.url}/x').read()"
    for container in ({"type": "auto"}, {"type": "auto", "network_policy": {"type": "disabled"}}):
        output, _ = await world.run(code, {"type": "code_interpreter", "container": container})
        assert "Operation not permitted" in output
    assert "HTTP_PROXY" not in (await world.run("import os; dict(os.environ)", {"type": "code_interpreter"}))[0]


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        ({"allowed_domains": ["evil.example"]}, "allowed_domains[0]"),
        ({"allowed_domains": [SITE, "example.com"]}, "allowed_domains[1]"),
        ({"allowed_domains": ["http://a.example.com"]}, "allowed_domains[0]"),
        ({"domain_secrets": [{"domain": "a.example.com", "name": "K", "value": SECRET}]}, "domain_secrets[0].domain"),
        ({"domain_secrets": [{"domain": SITE, "name": "PATH", "value": SECRET}]}, "domain_secrets[0].name"),
        ({"domain_secrets": [{"domain": SITE, "name": "K", "value": "sk-0123\n56789"}]}, "domain_secrets[0].value"),
    ],
)
async def test_a_policy_beyond_the_run_config_is_refused_by_name(world: World, policy: Json, param: str) -> None:
    whole = {"type": "allowlist", "allowed_domains": [SITE], **policy}
    declared = {"type": "auto", "network_policy": whole}
    error = await refusal(world.served, tools=[{"type": "code_interpreter", "container": declared}])
    assert error["param"] == f"tools[0].container.network_policy.{param}"
    declared = {"type": "container_auto", "network_policy": whole}
    error = await refusal(world.served, tools=[{"type": "shell", "environment": declared}])
    assert error["param"] == f"tools[0].environment.network_policy.{param}"
    with pytest.raises(BadRequestError) as caught:
        await world.served.client.containers.create(name="c", network_policy=whole)  # type: ignore[arg-type] # some are wrong
    assert caught.value.param == f"network_policy.{param}"
    assert "sk-0123" not in str(caught.value)


# --- packages --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not has_system_pip(), reason="the system's Python has no pip (apt: python3-pip)")
async def test_pip_installs_from_an_allowed_index(world: World) -> None:
    index = serve_wheel(world.secure, "answering", "ANSWER = 42")
    code = f"""
import subprocess, sys
command = [sys.executable, "-m", "pip", "install", "--index-url", "{index}", "answering"]
print(subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL))
import answering
answering.ANSWER
"""
    output, response = await world.run(code, world.interpreter())
    assert output.endswith("\n42"), output
    output, _ = await world.run("__import__('answering').ANSWER", world.interpreter(), previous_response_id=response.id)
    assert output == "42"


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("npm") or "").startswith("/usr"), reason="there is no npm below /usr")
async def test_npm_installs_from_an_allowed_registry(world: World) -> None:
    registry = serve_npm_package(world.secure, "answering", "module.exports = 42")
    command = f"cd /tmp && npm install --registry {registry} answering && node -p 'require(\"answering\")'"
    output, _ = await world.run_command(command, world.shell())
    assert "\n42\n" in output, output


# --- programs that want more -----------------------------------------------------------------------------------------

HOSTILE = {
    "another port": "ask('http://{site}:{other}/')",
    "another host": "ask('http://evil.example/')",
    "an allowed host at a private address": "ask('http://localhost:{port}/x')",
    "another address": "ask('http://127.0.0.1:{port}/x')",
    "the metadata of a cloud": "ask('http://169.254.169.254/latest/meta-data')",
    "an address without the proxy": "connect(('{site}', {port}))",
    "the internet without the proxy": "connect(('192.0.2.1', 443))",
    "a name without the proxy": "attempt(socket.getaddrinfo, 'example.com', 443)",
    "a datagram": "attempt(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b'x', ('8.8.8.8', 53))",
    "a raw socket": "attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "a packet": "attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 3)",
    "the port of the proxy": "attempt(socket.create_server, ('127.0.0.1', 3128))",
    "the tunnel in another's name": """
tunnel = socket.create_connection(("127.0.0.1", 3128))
tunnel.sendall(b"CONNECT {site}:{port} HTTP/1.0\\r\\n\\r\\nGET http://evil.example/ HTTP/1.0\\r\\n\\r\\n")
answer = b"".join(iter(lambda: tunnel.recv(65536), b""))
print("refused" if answer.count(b"HTTP/1.") == 1 and b"the page" not in answer else answer)
""",
}
PRELUDE = """
import os, socket, urllib.request
os.environ.update(NO_PROXY="", no_proxy="")
def ask(url):
    try:
        print(urllib.request.urlopen(url, timeout=3).read())
    except OSError as exc:
        print("refused", exc)
def attempt(action, *arguments):
    try:
        print(action(*arguments))
    except OSError as exc:
        print("refused", exc)
def connect(address):
    attempt(socket.create_connection, address, 1)
"""


async def test_a_hostile_program_reaches_nothing_else(world: World) -> None:
    before = len(world.plain.requests)
    refusals_before = world.refusals
    names = {"site": SITE, "port": world.plain.port, "other": world.plain.port + 1}
    programs = [program.replace("{site}", "%(site)s").replace("{port}", "%(port)s") for program in HOSTILE.values()]
    code = PRELUDE + "\n".join(program.replace("{other}", "%(other)s") % names for program in programs)
    output, _ = await world.run(code, world.interpreter(SITE, "localhost"))
    lines = output.splitlines()
    assert [line for line in lines if not line.startswith("refused")] == []
    assert len(lines) == len(HOSTILE)
    assert len(world.plain.requests) == before
    assert world.refusals - refusals_before == 6


async def test_a_program_cannot_take_the_proxy_away_from_others(world: World) -> None:
    """It may break its own connections; the next ones work."""
    code = """
import os, signal, socket, urllib.request
held = [socket.create_connection(("127.0.0.1", 3128)) for _ in range(60)]
for number in range(3, 100):
    try:
        os.close(number)
    except OSError:
        pass
"""
    tool = world.interpreter()
    await world.run(code, tool)
    output, _ = await world.run(f"import urllib.request; urllib.request.urlopen('{world.plain.url}/x').read()", tool)
    assert output == "b'the page'"


async def test_a_container_that_is_deleted_takes_its_connections_along(world: World) -> None:
    world.plain.endless("/endless", b"x", 0.01, {})
    code = f"import urllib.request; answer = urllib.request.urlopen('{world.plain.url}/endless'); answer.read(1)"
    output, response = await world.run(code, world.interpreter())
    assert output == "b'x'"
    assert not world.plain.dropped.is_set()
    await world.served.client.containers.delete(response.output[0].container_id)
    await asyncio.wait_for(world.plain.dropped.wait(), 10)


# --- secrets ---------------------------------------------------------------------------------------------------------

PRINT_ALL = """
import glob, os, subprocess
print(dict(os.environ))
folders = ("/etc/**/*", "/mnt/**/*", "/dev/shm/**/*")
for pattern in ("/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline", "/proc/self/mountinfo", *folders):
    for path in glob.glob(pattern, recursive=True):
        try:
            if os.path.isfile(path) and os.path.getsize(path) < 100_000:
                print(path, open(path, "rb").read()[:20_000])
        except OSError:
            pass
needle = b"-domain-secre"  # without its last letter, so that this program itself is not found
for pid in ("1", "self"):
    try:
        spans = [line.split()[0].split("-") for line in open(f"/proc/{pid}/maps") if line.split()[1].startswith("rw")]
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for start, end in spans:
                memory.seek(int(start, 16))
                data = memory.read(int(end, 16) - int(start, 16))
                at = -1
                while (at := data.find(needle, at + 1)) >= 0:
                    if data[at + len(needle):at + len(needle) + 1] == b"t":
                        print("FOUND")
    except (OSError, OverflowError):
        pass
"""
USE = """
import json, os, urllib.request
request = urllib.request.Request("{url}/echo", headers={{"Authorization": "Bearer " + os.environ["API_KEY"]}})
answer = json.loads(urllib.request.urlopen(request).read())
print(answer["Authorization"] == "Bearer " + os.environ["API_KEY"], answer)
"""


async def test_a_secret_reaches_its_host_and_nothing_else(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tool = world.interpreter(secret=SECRET)
    use = USE.format(url=world.secure.url)
    output, response = await world.run(use, tool)
    assert output.startswith("True ")
    assert world.secure.requests[-1][2]["Authorization"] == f"Bearer {SECRET}"
    printed, _ = await world.run(PRINT_ALL, tool, previous_response_id=response.id)
    assert "API_KEY" in printed
    assert "FOUND" not in printed
    control, _ = await world.run(
        f"held = 'sk-0123456789' + '-domain-secret'\n{PRINT_ALL}", tool, previous_response_id=response.id
    )
    assert "FOUND" in control  # so a secret in its memory would be seen
    turns: list[Script] = [[call("python", json.dumps({"code": use}), id="c1")]]
    events = await stream(world.served, input=play(*turns), tools=[tool])
    got = await responses(world.served).retrieve(response.id)
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer key-of-a"}
        async with session.get(f"{world.served.url}/v1/stack/overview", headers=headers) as answer:
            overview = await answer.text()
    texts = [output, printed, response.to_json(), got.to_json(), overview, caplog.text, *map(str, events)]
    assert [text for text in texts if SECRET in text] == []
    stored_text = await world.all_kept_text()
    assert response.id in stored_text
    assert SECRET not in stored_text


async def test_a_later_request_of_a_chain_may_bring_a_new_value(world: World) -> None:
    use = USE.format(url=world.secure.url)
    _, first = await world.run("x = 1", world.interpreter(secret=SECRET))
    output, second = await world.run(f"{use}print(x)", world.interpreter(secret=ROTATED), previous_response_id=first.id)
    assert output.endswith("1")  # the same container
    assert world.secure.requests[-1][2]["Authorization"] == f"Bearer {ROTATED}"
    assert first.output[0].container_id == second.output[0].container_id
    for other in (
        world.interpreter(),
        world.interpreter(SITE, "localhost", secret=SECRET),
        {"type": "code_interpreter"},
    ):
        _, third = await world.run("0", other, previous_response_id=second.id)
        assert third.output[0].container_id != second.output[0].container_id


async def test_a_background_response_may_have_a_secret(world: World) -> None:
    turns: list[Script] = [[call("python", json.dumps({"code": USE.format(url=world.secure.url)}), id="c1")]]
    response = await create(
        world.served, input=play(*turns), tools=[world.interpreter(secret=SECRET)], background=True, store=True
    )
    response = await until_ended(responses(world.served), response.id, within_s=20)
    assert response.status == "completed", response.error
    assert world.secure.requests[-1][2]["Authorization"] == f"Bearer {SECRET}"
    assert SECRET not in await world.all_kept_text()


async def test_a_secret_of_a_vault_is_sent_and_never_known_inside(world: World) -> None:
    vaults: Any = world.served.client.beta.agents.vaults
    vault = await vaults.create()
    auth = {"type": "environment_variable", "secret_name": "VAULT_KEY", "secret_value": SECRET}
    auth["networking"] = {"type": "limited", "allowed_hosts": [SITE, "elsewhere.example"]}  # type: ignore[assignment] # JSON
    credential = await vaults.credentials.create(vault.id, name="n", auth=auth)
    code = f"""
import os, urllib.request
request = urllib.request.Request("{world.secure.url}/echo", headers={{"X-Key": os.environ["VAULT_KEY"]}})
urllib.request.urlopen(request).read().decode(), os.environ["VAULT_KEY"]
"""
    named: Any = {"extra_body": {"vault_ids": [vault.id]}}
    output, response = await world.run(code, world.interpreter(), **named)
    assert SECRET not in output
    assert world.secure.requests[-1][2]["X-Key"] == SECRET
    again, response = await world.run(code, world.interpreter(), previous_response_id=response.id, **named)
    assert again == output
    await vaults.credentials.delete(credential.id, vault_id=vault.id)
    await world.run(code, world.interpreter(), previous_response_id=response.id, **named)
    assert world.secure.requests[-1][2]["X-Key"].startswith("placeholder-")
    assert SECRET not in await world.all_kept_text()


async def test_a_container_has_at_most_a_hundred_values_of_vaults(world: World) -> None:
    """Each answer of their hosts is searched for all of them."""
    vaults: Any = world.served.client.beta.agents.vaults
    first, second = [await vaults.create() for _ in range(2)]
    networking = {"type": "limited", "allowed_hosts": [SITE]}
    for number in range(101):
        secret = {"secret_name": f"KEY_{number}", "secret_value": f"{SECRET}-{number}"}
        auth = {"type": "environment_variable", **secret, "networking": networking}
        vault = first if number < 100 else second
        await vaults.credentials.create(vault.id, name=f"n{number}", auth=auth)
    code = "import os\nsum(value.startswith('placeholder-') for value in os.environ.values())"
    output, _ = await world.run(code, world.interpreter(), extra_body={"vault_ids": [first.id]})
    assert "100" in output
    with pytest.raises(BadRequestError, match="at most 100 different values") as refused:
        await world.run(code, world.interpreter(), extra_body={"vault_ids": [first.id, second.id]})
    assert refused.value.param == "vault_ids"
