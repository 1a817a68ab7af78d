"""Indexes of packages that a Site serves: one package for pip, and one for npm."""

import base64
import hashlib
import io
import json
import tarfile
import zipfile

from tests.support.servers.fetcher_hosts import Site


def serve_wheel(site: Site, name: str, code: str) -> str:
    """Serve a wheel whose module has this code; return the URL of the index."""
    archive, info = io.BytesIO(), f"{name}-1.0.dist-info"
    members = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(archive, "w") as wheel:
        for path, text in {**members, f"{info}/RECORD": "".join(f"{path},,\n" for path in members)}.items():
            wheel.writestr(path, text)
    file = f"{name}-1.0-py3-none-any.whl"
    site.page(f"/files/{file}", archive.getvalue(), "application/octet-stream")
    site.page(f"/simple/{name}/", f'<!DOCTYPE html><a href="/files/{file}">{file}</a>')
    return f"{site.url}/simple/"


def serve_npm_package(site: Site, name: str, code: str) -> str:
    """Serve a package of npm whose module has this code; return the URL of the registry."""
    archive, manifest = io.BytesIO(), {"name": name, "version": "1.0.0", "main": "index.js"}
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        for path, text in {"package/package.json": json.dumps(manifest), "package/index.js": code}.items():
            member = tarfile.TarInfo(path)
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text.encode()))
    data = archive.getvalue()
    tarball = site.page(f"/{name}/-/{name}-1.0.0.tgz", data, "application/octet-stream")
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    version = {**manifest, "dist": {"tarball": tarball, "integrity": integrity}}
    document = {"name": name, "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    site.page(f"/{name}", json.dumps(document), "application/json")
    return f"{site.url}/"
