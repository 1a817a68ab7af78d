"""Budgets and laws of the house, held against every file. A budget is an alarm: nothing is written to meet one."""

import ast
import importlib
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.laws.source_trees import ROOT, files_with, nodes, python_files, shared_trees, text, tree

__all__ = ["shared_trees"]

CODE: Final = ("apis", "providers", "stack", "configs")
FOLDERS: Final = {"apis", "configs", "distributions", "providers", "stack", "tests"}
ROOT_FILES: Final = {
    "pyproject.toml",
    "README.md",
    "ARCHITECTURE.md",
    "LICENSE",
    "NOTICE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
}
BROAD_EXCEPTS: Final = {
    "providers/common/supervision.py",  # the outer edge of background work, which is started again
    "providers/inference/gpt_oss/engine/engine.py",  # the engine thread's outer edge
    "providers/inference/chat_completions/answer_stream.py",  # in a transport's callback: raised where it is read
    "providers/tool_runtime/python/guest.py",  # around the model's program: its exceptions are its output
    "providers/responses/background/execution.py",  # the same for responses that run without a stream
    "providers/responses/run/response_runner.py",  # the stream's outer edge
    "stack/http/edge.py",  # the same for what is no stream
    "stack/http/routes/batch_lines.py",  # the same for lines of batches
    "stack/http/websocket.py",  # the outer edge of a stream on a connection that goes on
    "providers/responses/run/hosted_calls.py",  # around a tool call: the model gets the error
}
DECODES_SCANS: Final = {
    # an answer whose history cannot be read is an error
    "providers/responses/store/conversation_items.py load_conversation_items",
    "providers/responses/store/history.py _load_turns",
    # one record of another key
    "providers/batches/workers.py _list_blocks",
}
"""Functions that scan and decode without skipping damaged records."""
REPEATS_WRITES: Final = {
    "providers/accounts/spending.py set",  # against all that is counted meanwhile: five times as many attempts
    "providers/responses/background/offers.py send",  # polls for an answer
}
"""Functions that repeat a conditional write by themselves: all others leave that to `change` and its like."""
CLAIMS: Final = {
    "providers/common/jobs.py",
    "providers/responses/background/runs.py",  # runs that begin at once, or are cancelled
    "providers/responses/store/conversation_lock.py",  # one turn of a conversation at a time
    "providers/vaults/oauth.py",  # a refresh token may be good for one use
    "stack/retention/sweeper.py",  # one sweep in each interval: its lease is not released
    "stack/http/idempotency.py",  # one request of a key at a time
}
"""Files that acquire leases: queues of jobs leave that to LeasedJobs."""
LONE_INTERFACES: Final = {
    "Containers": "responses use the containers of a tool runtime",
    "Conversations": "Responses hands it out",
    "Fetcher": "responses, tools, readers, accounts and webhooks fetch by it",
    "ImageGenerator": "responses make images by it",
    "Meter": "responses, batches and vector stores end charges by it",
    "ModelInstaller": "inference hands it out",
    "Observation": "Responses hands it out",
    "Reader": "responses and vector stores read files by it",
    "Responses": "the API of the product",
    "Session": "Responses hands it out",
    "Skills": "tool runtimes mount skills by it",
    "ToolServers": "responses call the tools of MCP servers by it",
    "Vaults": "responses and agents use the secrets of clients by it",
    "VectorStores": "responses search files by it",
    "Workspaces": "sessions of agents run commands in them",
    "Webhooks": "responses and batches report their ends to it",
}
"""Interfaces with one class, and why they are there: providers of different APIs do not import each other."""
OPENS_SOCKETS: Final = {
    # to where requests, models, tools and pages point
    "providers/common/net/checked_hosts.py",
    "providers/fetcher/connections.py",
    "providers/fetcher/safe.py",
    "providers/tool_runtime/python/egress/connection.py",
    "providers/tool_runtime/python/egress/hand_over.py",
    "providers/tool_runtime/python/egress/proxy.py",
    # to hosts that the run config names
    "providers/common/net/http/client.py",
    "providers/common/net/http/route.py",  # reads the environment's proxies and opens nothing
    "providers/common/net/service_client.py",
    "providers/accounts/alerts/mailer.py",
    "providers/image_generator/images_client.py",
    "providers/inference/model_files/hub_child.py",
    "providers/tool_runtime/search_service.py",
    # an httpx transport over the Fetcher, for a library that wants one
    "providers/tool_servers/mcp/servers.py",
    "providers/tool_servers/mcp/wire.py",
    # names of errors of the OpenAI client's WebSocket
    "stack/doctor/server_checks.py",
    # the server's own listener, and a pipe to a child process; to other workers, through a Unix socket
    "providers/tool_runtime/python/check.py",
    "providers/tool_runtime/python/guest.py",
    "providers/tool_runtime/python/session_client.py",
    "providers/tool_runtime/python/guest_channel.py",
    "providers/tool_runtime/python/session_server.py",
    "providers/tool_runtime/python/session.py",
    "providers/tool_runtime/python/socket_folder.py",
    "stack/serving/connection.py",  # names of socket options
    "stack/serving/launch.py",
    "stack/serving/listener.py",
    "stack/serving/serve.py",
    "providers/common/processes/process.py",  # pairs of sockets to child processes
}
"""Who may import what opens connections; the stores' own clients aside."""
MAX_LINES: Final = 500
LONGER: Final = {"providers/tool_runtime/python/guest.py": 740}
"""A program that is given to an interpreter in the sandbox as one file."""
MAX_FUNCTION_LINES: Final = 50
LONGER_FUNCTIONS: Final = {"providers/responses/prepare.py _prepare": 110}
"""Functions that may be longer: all steps from a request to its response, in their order, with one branch."""
MAX_PARAMETERS: Final = 7
WIDER: Final = {"start_process": 8}
"""Functions that take more: the arguments of a process have the names of subprocess.Popen."""
MAX_MODULES: Final = 30
"""Modules in one folder, its `__init__` aside."""
MAX_IMPORTS: Final = 26
"""Modules of ours that one module may import."""
MANY_IMPORTS: Final = {
    # a method for each kind of request that a server takes
    "providers/inference/chat_completions/endpoint.py": 28,
    # the constructor of the whole API
    "providers/responses/loop.py": 31,
}
"""Modules that may import more."""
BAD_NAMES: Final = re.compile(r"(Impl|Adapter|Mixin|Manager|Base|Utils?|Helpers?)$")

Function = ast.FunctionDef | ast.AsyncFunctionDef

OURS: Final = python_files(*CODE)
ALL: Final = [*OURS, *python_files("tests")]


def functions(file: Path) -> Iterator[Function]:
    for node in nodes(file):
        if isinstance(node, Function):
            yield node


def where(file: Path, line: int = 0) -> str:
    return f"{file.relative_to(ROOT)}{f':{line}' if line else ''}"


def is_kernel(function: Function) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_provider_constructor(function: Function) -> bool:
    """A provider's constructor, whose arguments are its config and APIs: the wiring fills them by type."""
    return function.name == "__init__" and [each.arg for each in function.args.args[1:2]] == ["config"]


def test_no_file_is_longer_than_it_may_be() -> None:
    lengths = {where(file): len(text(file).splitlines()) for file in ALL}
    assert {file: length for file, length in lengths.items() if length > LONGER.get(file, MAX_LINES)} == {}


def test_no_function_is_longer_than_it_may_be() -> None:
    long: dict[str, int] = {}
    for file in OURS:
        for function in functions(file):
            length = (function.end_lineno or 0) - function.lineno + 1
            limit = LONGER_FUNCTIONS.get(f"{where(file)} {function.name}", MAX_FUNCTION_LINES)
            if length > limit and not is_kernel(function):
                long[f"{where(file, function.lineno)} {function.name}"] = length
    assert long == {}


def test_no_function_takes_more_than_it_may() -> None:
    wide: dict[str, int] = {}
    for file in OURS:
        for function in functions(file):
            taken = function.args
            names = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
            if function.name == "__init__" and "config" in names:
                continue  # a provider's constructor: the wiring passes one argument for each API it builds on
            count = len([name for name in names if name not in ("self", "cls")])
            limit = WIDER.get(function.name, MAX_PARAMETERS)
            if count > limit and not (is_kernel(function) or is_provider_constructor(function)):
                wide[f"{where(file, function.lineno)} {function.name}"] = count
    assert wide == {}


def test_no_call_unpacks_a_tuple_that_it_writes_itself() -> None:
    """Arguments are written one by one: a tuple around some of them says nothing and only saves lines."""
    packed = [
        where(file, argument.lineno)
        for file in files_with(r"\*\s*\(", ALL)
        for node in nodes(file)
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
    ]
    assert packed == []


def test_no_folder_holds_more_modules_than_it_may() -> None:
    folders = Counter(
        where(file.parent) for file in OURS if file.name != "__init__.py" and file.parent.name != "kernels"
    )
    assert {folder: count for folder, count in folders.items() if count > MAX_MODULES} == {}


def test_no_module_imports_more_of_ours_than_it_may() -> None:
    counts: dict[str, int] = {}
    for file in OURS:
        imports = {node.module for node in nodes(file) if isinstance(node, ast.ImportFrom)}
        counts[where(file)] = len([name for name in imports if name and name.partition(".")[0] in CODE])
    assert {file: count for file, count in counts.items() if count > MANY_IMPORTS.get(file, MAX_IMPORTS)} == {}


def test_every_room_says_what_belongs_in_it() -> None:
    folders = {file.parent for file in OURS}
    silent = [
        where(folder)
        for folder in sorted(folders)
        if not (folder / "README.md").exists()
        and not ((folder / "__init__.py").exists() and ast.get_docstring(tree(folder / "__init__.py")))
    ]
    assert silent == []


def test_every_file_opens_by_saying_its_job() -> None:
    undocumented = [file for file in ALL if not text(file).startswith('"""')]
    assert [
        where(file) for file in undocumented if not ast.get_docstring(tree(file)) and file.name != "conftest.py"
    ] == []


def test_every_interface_says_what_it_promises() -> None:
    silent: list[str] = []
    for file in python_files("apis"):
        for node in tree(file).body:
            if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
                continue
            abstract = isinstance(node, ast.ClassDef) and any("ABC" in ast.unparse(each) for each in node.bases)
            wire = isinstance(node, ast.ClassDef) and not abstract and not _is_error(node)
            if not wire and not ast.get_docstring(node):
                silent.append(f"{where(file, node.lineno)} {node.name}")
            if isinstance(node, ast.ClassDef) and abstract:
                silent += [
                    f"{where(file, method.lineno)} {node.name}.{method.name}"
                    for method in node.body
                    if isinstance(method, Function)
                    and not method.name.startswith("_")
                    and not ast.get_docstring(method)
                ]
    assert silent == []


def test_an_interface_has_two_classes_or_a_reason() -> None:
    bases: dict[str, set[str]] = {}
    interfaces: set[str] = set()
    for file in OURS:
        for node in tree(file).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(each).partition("[")[0] for each in node.bases}
                if "ABC" in bases[node.name] and file.is_relative_to(ROOT / "apis"):
                    interfaces.add(node.name)
    assert len(interfaces) > len(LONE_INTERFACES)

    def implements(name: str, interface: str) -> bool:
        return any(base == interface or implements(base, interface) for base in bases.get(name, ()))

    counts = {each: sum(implements(name, each) for name in bases if "ABC" not in bases[name]) for each in interfaces}
    assert {name for name, count in counts.items() if count < 2} == LONE_INTERFACES.keys()


def _is_error(node: ast.ClassDef) -> bool:
    return any(ast.unparse(each).endswith(("Error", "Exception", "Request", "NotFound")) for each in node.bases)


def test_no_class_is_named_for_its_pattern() -> None:
    named = [
        f"{where(file, node.lineno)} {node.name}"
        for file in OURS
        for node in nodes(file)
        if isinstance(node, ast.ClassDef) and BAD_NAMES.search(node.name)
    ]
    assert named == []


def test_everything_is_caught_only_at_the_edges() -> None:
    broad: set[str] = set()
    for file in OURS:
        for node in nodes(file):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            ):
                reraised = any(isinstance(last, ast.Raise) and last.exc is None for last in node.body[-1:])
                if not reraised:
                    broad.add(where(file))
    assert broad <= BROAD_EXCEPTS


def test_a_scan_of_records_skips_the_damaged_ones() -> None:
    """Code that reads many records goes on after one that cannot be read (`providers/common/state/scan.py`)."""
    strict: set[str] = set()
    for file in files_with(r"\bdecode_record\b", OURS):
        for function in functions(file):
            calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
            scans = calls & {"scan_all", "scan_groups"} or any(call.endswith("kv.scan") for call in calls)
            if scans and "decode_record" in calls and "skipping_damaged" not in calls:
                strict.add(f"{where(file)} {function.name}")
    assert strict == DECODES_SCANS


def repeats_write(loop: ast.While | ast.For) -> bool:
    """Return true for a loop that writes again where a condition of its write did not hold."""
    writes = re.compile(r"\bwrite\(.*\) is (not )?None", re.DOTALL)
    tests = [node.test for node in ast.walk(loop) if isinstance(node, ast.If | ast.While)]
    counts = isinstance(loop, ast.While) or ast.unparse(loop.iter).startswith("range(")
    return counts and any(writes.search(ast.unparse(test)) for test in tests)


def test_a_conditional_write_is_repeated_in_one_place() -> None:
    loops = {
        f"{where(file)} {function.name}"
        for file in files_with(r"\bwrite\(", OURS)
        for function in functions(file)
        for node in ast.walk(function)
        if isinstance(node, ast.While | ast.For) and repeats_write(node)
    }
    assert loops == REPEATS_WRITES


def test_jobs_are_claimed_in_one_place() -> None:
    claims = re.compile(r"\b(Run)?Lease\((?!Lease\))")
    files = {where(file) for file in OURS if "import Lease" in text(file) and claims.search(text(file))}
    assert files == CLAIMS


def is_lame(comment: str) -> bool:
    """Return true for an exemption without a code and a reason."""
    return bool(re.search(r"#\s*(type:\s*ignore|pyright:\s*ignore|noqa)", comment)) and not re.search(
        r"#\s*(type: ignore|pyright: ignore)\[[\w, -]+\]\s*(#|-)\s*\S|#\s*noqa: [A-Z]+\d+.*\s(#|-)\s*\S", comment
    )


def may_be_lame(line: str) -> bool:
    """Return true if a comment of the line would be lame, wherever it begins: strings have hashes, too."""
    return any(is_lame(line[hash_.start() :]) for hash_ in re.finditer("#", line))


def test_every_exemption_says_from_what_and_why() -> None:
    lame: list[str] = []
    for file in ALL:
        if not any(map(may_be_lame, text(file).splitlines())):
            continue
        with file.open("rb") as stream:
            comments = [token for token in tokenize.tokenize(stream.readline) if token.type == tokenize.COMMENT]
        lame += [f"{where(file, each.start[0])} {each.string}" for each in comments if is_lame(each.string)]
    assert lame == []


def test_imports_stand_at_the_top() -> None:
    inner: list[str] = []
    for file in files_with(rf"(?m)^[ \t]+(from|import)\s.*\b({'|'.join(CODE)})\b", OURS):
        for function in functions(file):
            for node in ast.walk(function):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
                inner += [where(file, function.lineno) for name in names if name.partition(".")[0] in CODE]
    assert inner == []


def test_the_top_of_the_tree_is_what_the_design_says() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    tops = {line.partition("/") for line in listed.stdout.splitlines()}
    assert {name for name, slash, _ in tops if slash and not name.startswith(".")} <= FOLDERS
    assert {name for name, slash, _ in tops if not slash and not name.startswith(".")} <= ROOT_FILES


def test_who_may_import_whom() -> None:
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_what_every_stack_needs_loads_no_engine_and_no_types_of_betas() -> None:
    modules = ("apis.responses", "stack.http.app", "providers.responses.loop", "providers.inference.vllm")
    engines = ("torch", "triton", "redis", "asyncpg", "xllamacpp", "openai_harmony", "llguidance")
    large = (*engines, "openai.types.beta")
    program = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(module)\n"
        f"    print(module, [name for name in {large} if name in sys.modules])"
    )
    imported = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True)
    assert imported.stdout.splitlines() == [f"{module} []" for module in modules]


def test_torch_is_the_local_engines_alone() -> None:
    home = ROOT / "providers/inference/gpt_oss"
    files = set((home / "engine").glob("*.py"))
    assert files
    imported = re.compile(r"^\s*(from|import) (torch|triton)\b", re.MULTILINE)
    importers = {file for file in OURS if imported.search(text(file))}
    assert {where(file) for file in importers if home not in file.parents or file in files} == set()


def test_only_the_fetcher_goes_where_others_point() -> None:
    opens = re.compile(
        r"^\s*(from|import) (aiohttp|(aio)?smtplib|http(x|core)2?|socket|requests|websockets|urllib\.request|urllib3"
        r"|http\.client)\b"
        r"|\bopen_connection\(|\bcreate_connection\(",
        re.MULTILINE,
    )
    files = {where(file) for file in OURS if opens.search(text(file))}
    assert files == OPENS_SOCKETS


def test_every_registered_provider_is_there_under_its_modules_name() -> None:
    registry = importlib.import_module("providers").PROVIDERS
    for api, providers in registry.items():
        assert list(providers) == sorted(providers)
        for name, target in providers.items():
            module, _, class_name = target.partition(":")
            file = ROOT / f"{module.replace('.', '/')}"
            assert file.with_suffix(".py").exists() or file.is_dir(), target
            assert module.startswith(f"providers.{api}.")
            assert module.split(".")[2] == name
            assert class_name


def imports_from_strings(file: Path) -> Iterator[tuple[str, str]]:
    """The place and the target of each import of ours by string, called directly or in a thread."""
    for node in nodes(file):
        if isinstance(node, ast.Call):
            names = [ast.unparse(each) for each in (node.func, *node.args[:1])]
            if "import_from_string" in names:
                target = node.args[names.index("import_from_string")]
                if isinstance(target, ast.Constant):
                    yield where(file, node.lineno), str(target.value)


def test_every_import_from_a_string_leads_to_a_name_of_its_module() -> None:
    targets = dict(entry for file in files_with("import_from_string", OURS) for entry in imports_from_strings(file))
    assert len(targets) > 5
    for place, target in targets.items():
        module, _, name = target.partition(":")
        file = ROOT / f"{module.replace('.', '/')}.py"
        assert file in OURS, f"{place}: {target}"
        body = tree(file).body
        names = {node.name for node in body if isinstance(node, Function | ast.ClassDef)}
        assert name in names, f"{place}: {target}"


def test_our_own_modules_are_imported_from_strings_in_one_way() -> None:
    ours = re.compile(r"import_module\(?[^)]*[\"'](apis|providers|stack)\.")
    assert [where(file) for file in OURS if ours.search(text(file))] == []


def test_a_public_class_name_means_one_thing() -> None:
    files: dict[str, set[str]] = {}
    for file in OURS:
        for node in nodes(file):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "Config":
                files.setdefault(node.name, set()).add(where(file))
    assert {name: sorted(places) for name, places in files.items() if len(places) > 1} == {}
