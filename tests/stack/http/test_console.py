"""The page's files over HTTP: where they are served, their headers, their size and the hashes of what is vendored."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import httpx2
import pytest

from stack.http.routes.console.page import FOLDER, HEADERS
from tests.support.sdk.client import TLS
from tests.support.servers.serving import serving

MOST_BYTES = 180_000
"""The largest sum over the files that every page loads, each compressed by itself."""
MOST_LATE_BYTES = 250_000
"""The largest sum over the files that a view, a formula or code in a language brings when it is first shown."""
MOST_LATE_FILE_BYTES = 125_000
MOST_LINES = 300
KEYED = {"api_keys": ["sk-1"]}


async def test_a_server_without_keys_serves_the_page() -> None:
    async with serving() as served, httpx2.AsyncClient(base_url=served.url, verify=TLS) as client:
        page = await client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.headers["content-security-policy"] == HEADERS["content-security-policy"]
        for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            file = await client.get(f"/{path}")
            assert file.status_code == 200, path
            unchanged = await client.get(f"/{path}", headers={"if-none-match": file.headers["etag"]})
            assert unchanged.status_code == 304
        assert (await client.get("/console/../stack/config.py")).status_code in (401, 404)
        assert (await client.get("/console/no.js")).status_code == 404
        assert (await client.post("/")).status_code == 405


@pytest.mark.parametrize(
    ("server", "status", "kind"),
    [
        (KEYED, 401, "application/json"),
        ({**KEYED, "console": True}, 200, "text/html; charset=utf-8"),
        ({"console": False}, 200, "application/json"),
    ],
)
async def test_a_server_with_keys_serves_it_when_it_is_asked_to(
    server: dict[str, object], status: int, kind: str
) -> None:
    """Without the page, the root only says which server it is."""
    async with serving(server=server) as served, httpx2.AsyncClient(base_url=served.url, verify=TLS) as client:
        page, head = await client.get("/"), await client.head("/")
    assert (page.status_code, page.headers["content-type"], head.status_code) == (status, kind, status)
    if (status, kind) == (200, "application/json"):
        assert page.json() == {"name": "responses-stack"}


def find_files_at_once() -> set[Path]:
    """Return the files of the first page: its own, and what its modules import by statements."""
    page = FOLDER / "index.html"
    linked = re.findall(r'(?:src|href)="console/([^"]+)"', page.read_text())
    waiting, files = [FOLDER / path for path in linked], {page}
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            imports = re.findall(
                r'^(?:import|export)(?: [\w*{}\s,]+ from)? "(\.[^"]+)"', path.read_text(), re.MULTILINE
            )
            waiting += [(path.parent / each).resolve() for each in imports if path.suffix == ".js"]
    return files


def test_the_page_is_small_and_its_own_files_are_short() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    sizes = {path: len(gzip.compress(path.read_bytes(), 9)) for path in files}
    at_once = find_files_at_once()
    assert {FOLDER / "main.js", FOLDER / "vendor" / "preact.js", FOLDER / "style" / "base.css"} <= at_once
    assert sum(sizes[path] for path in at_once) < MOST_BYTES, sum(sizes[path] for path in at_once)
    late = sizes.keys() - at_once
    assert sum(sizes[path] for path in late) < MOST_LATE_BYTES, sum(sizes[path] for path in late)
    assert max(sizes[path] for path in late) < MOST_LATE_FILE_BYTES
    for path in files:
        if "vendor" not in path.parts:
            assert len(path.read_text().splitlines()) <= MOST_LINES, path


def test_vendored_files_are_those_that_were_published() -> None:
    entries = json.loads((FOLDER / "vendor" / "vendor.json").read_text())
    vendor = FOLDER / "vendor"
    files = {path.relative_to(vendor).as_posix() for path in vendor.rglob("*") if path.is_file()}
    assert {entry["file"] for entry in entries} == files - {"vendor.json"}
    for entry in entries:
        assert hashlib.sha256((FOLDER / "vendor" / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
        assert entry["version"] in entry["source"]
        assert entry["license"]


def test_no_inline_script_or_style_is_in_the_page() -> None:
    text = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", text)
