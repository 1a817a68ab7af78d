"""The confinement of the reader's child, and its limits of memory."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from apis.confinement.seccomp import parser_filter, sandbox_filter
from apis.documents.reader import Document, UnreadableFile
from providers.fetcher.safe import GuardedFetcher
from providers.reader.child import ChildReader
from providers.reader.confinement import PROGRAM, ReaderConfinement, choose_confinement
from stack.build import align_lines, confinement_lines, open_stack
from stack.config import StackConfig
from tests.support.models import documents
from tests.support.servers.normal_user import can_change_user, normal_user_command, normal_user_environment

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
BODY = b'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>%b</w:body></w:document>'
CELL = b'<w:tc><w:tcPr><w:gridSpan w:val="%d"/></w:tcPr><w:p><w:r><w:t>x</w:t></w:r></w:p></w:tc>'

PROBE = """
import json
from providers.reader import confinement
paths = confinement._find_readable_paths()
for candidate in (confinement._build_bubblewrap(paths), confinement._build_self_confinement(paths)):
    print(json.dumps(confinement._probe(candidate)))
print(json.dumps(confinement.choose_confinement().description))
"""
CONFINED = """
import json, os, resource, sys, _socket
sys.path.insert(0, sys.argv[1])
from providers.reader.self_confinement import confine
from apis.confinement.seccomp import parser_filter
victim = os.open(sys.argv[2], os.O_RDONLY)
layers = confine([sys.argv[1]], parser_filter() if sys.argv[3] == "seccomp" else b"")
attempts = {
    "socket": lambda: _socket.socket(_socket.AF_INET),
    "socketpair": lambda: _socket.socketpair(),
    "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "kill": lambda: os.kill(os.getppid(), 0),
    "limits": lambda: resource.prlimit(os.getppid(), 7),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
    "environ": lambda: open(f"/proc/{os.getppid()}/environ").read(),
    "passwd": lambda: open("/etc/passwd").read(),
    "folder": lambda: os.listdir("/"),
    "write": lambda: open(sys.argv[2], "w"),
    "write in a readable folder": lambda: open(sys.argv[1] + "/written", "w"),
    "chmod": lambda: os.fchmod(victim, 0o777),
    "unlink": lambda: os.unlink(sys.argv[2]),
    "truncate": lambda: os.truncate(sys.argv[2], 0),
}
if sys.argv[3] != "seccomp":
    del attempts["fork"]
possible = []
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    possible.append(name)
readable = len(open(sys.argv[1] + "/pyproject.toml").read()) > 0
print(json.dumps([layers, possible, readable]))
"""


def run_confined(victim: Path, layer: str) -> Any:
    command = [sys.executable, "-I", "-c", CONFINED, str(PROGRAM.parents[2]), str(victim), layer]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


@linux_only
def test_a_process_that_confines_itself_reaches_nothing_outside(tmp_path: Path) -> None:
    """Without bubblewrap a hole in a parser opens neither files nor the server's environment nor a socket."""
    victim = tmp_path / "victim"
    victim.write_text("x")
    arguments = (str(PROGRAM.parents[2]), str(victim), "seccomp")
    output = subprocess.run(
        [sys.executable, "-I", "-c", CONFINED, *arguments], stdout=subprocess.PIPE, check=True
    ).stdout
    layers, possible, is_readable = json.loads(output)
    assert layers == ["Landlock", "seccomp"]
    assert possible == []
    assert is_readable
    assert victim.read_text() == "x"


@linux_only
def test_landlock_alone_closes_the_files(tmp_path: Path) -> None:
    """Each layer holds by itself what it can."""
    (tmp_path / "victim").write_text("x")
    arguments = (str(PROGRAM.parents[2]), str(tmp_path / "victim"), "none")
    output = subprocess.run(
        [sys.executable, "-I", "-c", CONFINED, *arguments], stdout=subprocess.PIPE, check=True
    ).stdout
    layers, possible, _ = json.loads(output.splitlines()[-1])
    assert layers == ["Landlock"]
    assert not {"environ", "passwd", "folder", "write", "unlink", "truncate"} & {*possible}


@pytest.mark.skipif(not can_change_user(), reason="only root can start tests as another user")
def test_bubblewrap_holds_the_reader_of_a_normal_user(tmp_path: Path) -> None:
    """Where bubblewrap works the child runs in it."""
    command = normal_user_command(tmp_path, "-c", PROBE)
    output = subprocess.run(command, env=normal_user_environment(), stdout=subprocess.PIPE, check=True).stdout
    in_bubblewrap, by_itself, description = map(json.loads, output.splitlines())
    assert in_bubblewrap == [[], []]
    assert by_itself == [["Landlock", "seccomp"], []]
    assert description == "files are parsed in bubblewrap with seccomp"


async def test_the_start_says_how_files_are_parsed() -> None:
    """The log says it in one line."""
    config = StackConfig.model_validate({"inference": {"provider": "scripted"}, "kv_store": {"provider": "memory"}})
    async with open_stack(config) as stack:
        (line,) = confinement_lines(stack)
    assert line.startswith("reader        files are parsed in ")
    assert "only" not in line


def test_filters_differ_in_what_they_deny() -> None:
    """The filters exist for both architectures, within the kernel's 4,096 instructions."""
    for machine in ("x86_64", "aarch64"):
        filters = [sandbox_filter(machine), sandbox_filter(machine, allow_loopback=True), parser_filter(machine)]
        assert len({*filters}) == 3
        assert all(len(each) % 8 == 0 and len(each) < 4096 * 8 for each in filters)


async def test_a_child_has_a_quarter_of_a_gibibyte_and_for_a_pdf_half_of_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four children at once take no gigabytes."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; line = sys.stdin.buffer.readline().decode(); sys.stdin.buffer.read(); print('{}'); print(line)"
    )
    monkeypatch.setattr("providers.reader.confinement.PROGRAM", program)
    monkeypatch.setattr("providers.reader.child.choose_confinement", lambda: ReaderConfinement("none"))
    for data, memory_mib in ((b"text", 256), (b"%PDF-1.7", 512)):
        task = json.loads(await child().extract_text(Document("a", data), 1000))
        assert task["max_memory_bytes"] == memory_mib * 2**20 + len(data)


async def test_a_table_of_millions_of_columns_is_refused_at_once() -> None:
    """One attribute made the parser take a gigabyte."""
    wide = BODY % (b"<w:tbl><w:tr>%b</w:tr></w:tbl>" % (CELL % 200_000_000))
    many = BODY % (b"<w:tbl><w:tr>%b</w:tr></w:tbl>" % (CELL % 600 + CELL % 600))
    began = time.monotonic()
    for document in (wide, many):
        with pytest.raises(UnreadableFile, match="more than 1000 columns"):
            await child().extract_text(Document("a.docx", documents.word_with(document)), 1000)
    assert time.monotonic() - began < 5
    usual = BODY % (b"<w:tbl><w:tr>%b</w:tr></w:tbl>" % (CELL % 600 + CELL % 3))
    assert await child().extract_text(Document("a.docx", documents.word_with(usual)), 1000) == "x"


def child() -> ChildReader:
    return ChildReader(ChildReader.Config(), None, GuardedFetcher(GuardedFetcher.Config()))


def test_the_start_says_why_bubblewrap_does_not_hold_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason and the remedy, not that it does not work."""
    monkeypatch.setenv("PATH", "/nowhere")
    choose_confinement.cache_clear()
    try:
        description = choose_confinement().description
    finally:
        choose_confinement.cache_clear()
    assert "not in bubblewrap: the program `bwrap` of bubblewrap was not found; install it" in description


def test_lines_of_the_start_are_aligned_to_the_longest_name() -> None:
    """A long name and its line do not run together."""
    lines = align_lines({"reader": "a", "tool_runtime.providers.python": "b"})
    assert lines == ["reader                         a", "tool_runtime.providers.python  b"]
