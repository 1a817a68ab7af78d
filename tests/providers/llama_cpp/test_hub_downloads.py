"""Fetching model files from the hub: huggingface_hub in its child process, and a local server of the hub's protocol."""

import asyncio
import hashlib
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, try_to_load_from_cache

from apis.errors import ConfigError
from providers.inference.model_files.catalogue import HubFile
from providers.inference.model_files.hub import fetch_hub_file, list_hub_cache, remove_cached_file
from tests.support.servers.hub_server import COMMIT, HubServer, hub_environment, running_hub
from tests.support.waiting import until

REPOSITORY = "someone/tiny-GGUF"
FILE = "tiny-Q4.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 4096
"""One megabyte."""
KEPT_BYTES = 10 * 1024 * 1024
"""huggingface_hub writes pieces of that size."""
LARGE = CONTENT * 12
TINY = HubFile(REPOSITORY, FILE)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with running_hub() as server, hub_environment(server, str(tmp_path)):
        server.put(REPOSITORY, FILE, CONTENT)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "huggingface" / "hub"


async def fetch(file: HubFile = TINY) -> Path:
    path, _ = await fetch_hub_file(file, 60)
    return path


async def fetch_error(file: HubFile = TINY) -> str:
    with pytest.raises(ConfigError) as caught:
        await fetch(file)
    return str(caught.value)


def partials(cache: Path) -> list[int]:
    return [path.stat().st_size for path in cache.rglob("*.incomplete")]


async def test_a_file_is_downloaded_once_and_other_tools_find_it(
    hub: HubServer, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, downloaded = await fetch_hub_file(TINY, 60)
    assert (path.read_bytes(), downloaded) == (CONTENT, True)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert f"Fetching {REPOSITORY}/{FILE} (1 MB, this once) from {hub.url}" in printed.err
    assert "100 % of 1 MB" in printed.err
    requests = len(hub.requests)
    assert await fetch_hub_file(TINY, 60) == (path, False)
    assert len(hub.requests) == requests
    cached = str(try_to_load_from_cache(REPOSITORY, FILE, cache_dir=cache))
    assert (cached, Path(cached).resolve().name) == (str(path), hashlib.sha256(CONTENT).hexdigest())
    assert partials(cache) == []


async def test_the_token_goes_to_the_hub_and_to_no_other_host(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    assert "HF_TOKEN may not read it" in await fetch_error()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (await fetch()).read_bytes() == CONTENT
    sent = {path.startswith("/blob/"): "authorization" in headers for _, path, headers in hub.requests[-3:]}
    assert sent == {True: False, False: True}


async def test_a_download_that_breaks_continues_by_itself(hub: HubServer) -> None:
    hub.put(REPOSITORY, FILE, LARGE)
    hub.breaks = [KEPT_BYTES + 300_000]
    assert (await fetch()).read_bytes() == LARGE
    assert hub.ranges() == ["", f"bytes={KEPT_BYTES}-"]


@pytest.mark.long
async def test_a_signed_url_that_has_expired_is_replaced(hub: HubServer) -> None:
    hub.expired = 1
    assert (await fetch()).read_bytes() == CONTENT


async def test_a_stopped_download_continues_at_the_next_start(hub: HubServer, cache: Path) -> None:
    hub.put(REPOSITORY, FILE, LARGE)
    hub.stalls_after = KEPT_BYTES + 300_000
    stopped = asyncio.create_task(fetch())
    await until(lambda: partials(cache) == [KEPT_BYTES], within_s=60)
    stopped.cancel()
    await asyncio.gather(stopped, return_exceptions=True)
    hub.resumed.set()
    assert (await fetch()).read_bytes() == LARGE
    assert hub.ranges() == ["", f"bytes={KEPT_BYTES}-"]


@pytest.mark.long
async def test_a_server_without_ranges_sends_the_whole_file_again(hub: HubServer, cache: Path) -> None:
    hub.has_ranges = False
    blobs = cache / "models--someone--tiny-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(CONTENT).hexdigest()}.incomplete").write_bytes(CONTENT[:700_000])
    assert (await fetch()).read_bytes() == CONTENT


@pytest.mark.long
async def test_what_was_downloaded_stays_when_the_network_fails(hub: HubServer, cache: Path) -> None:
    hub.put(REPOSITORY, FILE, LARGE)
    hub.breaks, hub.expires_after_break = [KEPT_BYTES + 300_000], True
    assert "HTTP status 403" in await fetch_error()
    assert partials(cache) == [KEPT_BYTES]
    hub.expired = 0
    assert (await fetch()).read_bytes() == LARGE
    assert hub.ranges()[-1] == f"bytes={KEPT_BYTES}-"


async def test_a_file_with_another_digest_is_never_used(hub: HubServer, cache: Path) -> None:
    hub.stated_digests[FILE] = hashlib.sha256(b"another").hexdigest()
    assert "does not have the SHA-256" in await fetch_error()
    assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size == len(CONTENT)]


async def test_a_file_that_is_not_the_catalogues_is_not_downloaded(hub: HubServer) -> None:
    message = await fetch_error(replace(TINY, sha256=hashlib.sha256(b"the catalogue's").hexdigest()))
    assert "is not the file of the catalogue" in message
    assert f"hf:{REPOSITORY}/{FILE}" in message
    assert hub.ranges() == []


@pytest.mark.long
async def test_a_hub_that_states_no_digest_is_refused(hub: HubServer) -> None:
    hub.stated_digests[FILE] = "0" * 40
    assert "states no SHA-256" in await fetch_error()


@pytest.mark.long
async def test_a_damaged_file_of_another_tool_is_found(hub: HubServer) -> None:
    path = await fetch()
    path.resolve().write_bytes(CONTENT[:-1] + b"x")
    message = await fetch_error()
    assert "does not have the SHA-256" in message
    assert f"Remove {path.resolve()}" in message


async def test_a_missing_file_and_a_gated_repository_are_named(hub: HubServer) -> None:
    hub.gated.add("someone/gated")
    hub.put("someone/gated", FILE, CONTENT)
    missing = await fetch_error(HubFile(REPOSITORY, "none.gguf"))
    assert f"no file none.gguf at main. See {hub.url}/{REPOSITORY}/tree/main" in missing
    gated = await fetch_error(HubFile("someone/gated", FILE))
    assert f"Accept its terms at {hub.url}/someone/gated" in gated
    assert "HF_TOKEN" in gated


@pytest.mark.long
async def test_a_missing_repository_and_revision_are_named(hub: HubServer) -> None:
    assert "no repository no/body" in await fetch_error(HubFile("no/body", FILE))
    assert "no revision v9" in await fetch_error(replace(TINY, revision="v9"))


async def test_offline_uses_the_cache_and_says_what_is_missing(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await fetch()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert await fetch() == path
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert (await fetch(replace(TINY, revision="f" * 40, sha256=digest))).resolve() == path.resolve()
    requests = len(hub.requests)
    error = await fetch_error(HubFile(REPOSITORY, "other.gguf"))
    assert "HF_HUB_OFFLINE is set" in error
    assert error.endswith(f"On this machine are: hf:{REPOSITORY}/{FILE}.")
    assert len(hub.requests) == requests


async def test_without_a_network_the_models_of_the_machine_are_served_and_named(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal of another one names those that are there, as a run config does."""
    path = await fetch()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert await fetch() == path
    error = await fetch_error(HubFile(REPOSITORY, "other.gguf"))
    assert error.endswith(f"On this machine are: hf:{REPOSITORY}/{FILE}.")


@pytest.mark.long
async def test_a_hub_that_cannot_be_reached_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in await fetch_error()
    monkeypatch.setenv("HF_ENDPOINT", hub.network_url + "/blob")
    assert "HF_ENDPOINT" in await fetch_error()


@pytest.mark.long
async def test_a_disk_that_is_too_small_is_found_before_the_download(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.stated_sizes[FILE] = 49 * 10**9
    monkeypatch.setenv("HF_HUB_CACHE", "/dev/shm/responses-stack-test-cache")
    try:
        assert "set HF_HOME to a folder on another disk" in await fetch_error()
    finally:
        shutil.rmtree("/dev/shm/responses-stack-test-cache", ignore_errors=True)
    assert hub.ranges() == []


@pytest.mark.long
async def test_a_disk_that_fills_up_ends_the_download_and_keeps_its_bytes(hub: HubServer, cache: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        message = await fetch_error()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "is full" in message
    assert 0 < sum(partials(cache)) <= 500_000
    assert (await fetch()).read_bytes() == CONTENT


@pytest.mark.long
async def test_one_of_several_processes_downloads(hub: HubServer) -> None:
    paths = await asyncio.gather(*(fetch() for _ in range(3)))
    assert len(set(paths)) == 1
    assert len([method for method, path, _ in hub.requests if method == "GET" and path.startswith("/blob/")]) == 1


async def test_a_download_that_takes_too_long_ends_with_its_process(hub: HubServer) -> None:
    with pytest.raises(ConfigError, match="fetch_timeout_s"):
        await fetch_hub_file(TINY, 0.05)


@pytest.mark.long
async def test_a_file_is_listed_and_removed(hub: HubServer, cache: Path) -> None:
    path = await fetch()
    (row,) = (await list_hub_cache()).files
    assert (row.repository, row.file, row.size_bytes, row.path) == (REPOSITORY, FILE, len(CONTENT), str(path))
    assert await remove_cached_file(REPOSITORY, FILE) == len(CONTENT)
    assert not (cache / "models--someone--tiny-GGUF").exists()


@pytest.mark.long
async def test_a_file_is_removed_without_harm_to_others(hub: HubServer, cache: Path) -> None:
    hub.put(REPOSITORY, "other.gguf", CONTENT + b"other")
    hub.put(REPOSITORY, "same.gguf", CONTENT)
    assert (await list_hub_cache()).files == []
    path, other = await fetch(), await fetch(HubFile(REPOSITORY, "other.gguf"))
    await fetch(HubFile(REPOSITORY, "same.gguf"))
    assert {row.file for row in (await list_hub_cache()).files} == {FILE, "other.gguf", "same.gguf"}
    assert await remove_cached_file(REPOSITORY, FILE) == 0
    assert not path.exists()
    assert await remove_cached_file(REPOSITORY, "same.gguf") == len(CONTENT)
    assert other.read_bytes() == CONTENT + b"other"
    assert [row.file for row in (await list_hub_cache()).files] == ["other.gguf"]
    assert not scan_cache_dir(cache).warnings
    assert await remove_cached_file(REPOSITORY, "other.gguf") == len(CONTENT) + 5
    assert await remove_cached_file(REPOSITORY, "other.gguf") == 0


@pytest.mark.long
async def test_a_file_of_a_pinned_commit_is_found_there(hub: HubServer) -> None:
    path = await fetch(replace(TINY, revision=COMMIT))
    assert path.parent.name == COMMIT
