"""The server imports what it uses, of packages and of its own rooms; the rest is there for those who use it."""

import subprocess
import sys

CODE = """
import sys
import stack.cli, stack.serving.launch, stack.http.app
from openai.types.responses import Response
assert "openai._client" not in sys.modules, "the client was imported"
assert "openai.types.fine_tuning" not in sys.modules, "all types were imported"
assert "openai.types.responses.tool_param" not in sys.modules, "all types of responses were imported"
assert not {"uvicorn.main", "psutil._common"} & sys.modules.keys(), "more was imported than a server needs"
from openai.types.responses import ToolParam
assert ToolParam is sys.modules["openai.types.responses.tool_param"].ToolParam
assert "openai.types.responses.responses_client_event" not in sys.modules, "one name imported all others"
import openai
assert openai.types.responses.Response is Response
assert openai.OpenAI(api_key="k").api_key == "k"
from openai import AsyncOpenAI, types
assert types.Batch.__name__ == "Batch"
assert type(openai).__name__ == "module"
for package in (openai, types, types.responses):
    try:
        package.no_such_name
    except AttributeError as exc:
        print(exc)
assert type(types).__name__ == type(types.responses).__name__ == "module"
import psutil, uvicorn, uvicorn.config
assert uvicorn.Config is uvicorn.config.Config and uvicorn.__version__ and psutil.Process().pid
assert types.responses.Response is Response and types.responses.ToolParam is ToolParam
"""


def test_packages_are_executed_when_they_are_first_used() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == (
        "module 'openai' has no attribute 'no_such_name'\n"
        "module 'openai.types' has no attribute 'no_such_name'\n"
        "module 'openai.types.responses' has no attribute 'no_such_name'\n"
    )


ROOMS = """
import sys
import stack.cli
from stack.wiring import load_wired_config
from stack.serving import launch
from stack.http.app import create_app
create_app(load_wired_config("vllm")[0])
print(*sys.modules)
"""


def test_a_server_imports_the_rooms_that_its_run_config_names_and_the_routes_of_responses() -> None:
    run = subprocess.run([sys.executable, "-c", ROOMS], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    routes = {name.partition("stack.http.routes.")[2] for name in loaded if name.startswith("stack.http.routes.")}
    assert routes == {
        *("absences", "batch_lines", "calls", "console", "console.page", "server", "table"),
        *("conversations", "listings", "responses"),
    }
    rooms = ("batches", "files", "moderation", "skills", "tool_servers", "uploads", "vaults", "vector_stores")
    unused = (
        *(f"providers.{room}" for room in rooms),
        *("apis.messages", "stack.http.messages.conversion", "stack.http.websocket", "stack.retention"),
        *("apis.accounts.requests", "apis.agents.agents", "apis.containers", "apis.documents.vector_store_requests"),
        *("apis.wire.decisions", "apis.workspaces", "providers.inference.chat_completions.decisions"),
        *("providers.agents.definitions", "providers.agents.live", "providers.responses.tools.apply_patch"),
        *(f"providers.responses.tools.{tool}.tool" for tool in ("code_interpreter", "mcp", "shell", "web_search")),
        *("fastapi", "html", "openai.types.responses.response_stream_event"),
        *("prometheus_client.exposition", "psutil._common", "websockets.protocol"),
    )
    assert loaded.isdisjoint(unused)
    assert "apis.responses" in loaded
