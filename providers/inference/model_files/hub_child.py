"""Child process that works on the Hugging Face cache: fetches a file, lists the GGUF files, removes one.

Run as a script. It reads one line of JSON settings from stdin, writes one line of JSON to stdout, either `{"result":
...}` or `{"error": "..."}`, shows progress on stderr, and ends at once when its stdin ends: with its parent, or because
the parent gave up. With `reports` the progress is in lines of `{"done_bytes": ...}` before that line. huggingface_hub
reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. Nothing of this project is imported here.

A download goes to `blobs/DIGEST.incomplete` of the cache, under the lock that every tool of the hub uses, so that the
next attempt continues where this one ended. It gets its name in the cache once its SHA-256 is that of the hub.
"""

import contextlib
import errno
import glob
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants, errors

# Untyped in parts. `http_get` alone continues a file that another process began; a test holds it.
hub: Any = importlib.import_module("huggingface_hub")
file_download: Any = importlib.import_module("huggingface_hub.file_download")
hub_utils: Any = importlib.import_module("huggingface_hub.utils")

SHA256 = re.compile(r"[0-9a-f]{64}")
BLOCK_BYTES = 4 * 1024 * 1024
SPARE_DISK_BYTES = 64 * 1024 * 1024
MAX_FRUITLESS_ATTEMPTS = 3
HUB_ERRORS = (
    errors.HfHubHTTPError,
    errors.OfflineModeIsEnabled,
    errors.FileMetadataError,
    errors.LocalEntryNotFoundError,
    httpx2.HTTPError,
)
MAX_NAMED = 10
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FetchError(Exception):
    """The file cannot be had; the message says why and what to do."""


def main() -> None:
    # A library may print; only our one line may reach the parent's pipe.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.buffer.readline())
    if settings.pop("reports"):
        Report.output = output
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        outcome: dict[str, Any] = {"result": ACTIONS[settings.pop("action")](**settings)}
    except FetchError as exc:
        outcome = {"error": str(exc)}
    except OSError as exc:
        outcome = {"error": describe_os_error(exc)}
    output.write(json.dumps(outcome) + "\n")
    output.flush()


def end_with_parent() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def fetch(
    repository: str, file: str, revision: str, sha256: str, marks: str, limit_bytes: int | None
) -> dict[str, Any]:
    """Return the path of the file in the cache; download and verify it if it is not there. One of more than
    `limit_bytes`, for which this machine has no memory, is not downloaded."""
    path = find_cached(repository, file, revision, sha256)
    if path is None:
        try:
            path = download(repository, file, revision, sha256, limit_bytes)
        except HUB_ERRORS as exc:
            raise FetchError(describe_hub_error(exc, repository, file, revision)) from exc
        mark_verified(path, Path(marks))
        return {"path": str(path), "downloaded": True}
    verify_once(path, sha256, Path(marks))
    return {"path": str(path), "downloaded": False}


def find_cached(repository: str, file: str, revision: str, sha256: str) -> Path | None:
    """Return the file of that revision, or one of another revision with the same digest."""
    cached = hub.try_to_load_from_cache(repository, file, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    snapshots = os.path.join(glob.escape(str(repo_folder(repository))), "snapshots", "*", glob.escape(file))
    return next((Path(path) for path in glob.glob(snapshots) if sha256 and Path(path).resolve().name == sha256), None)


def repo_folder(repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / file_download.repo_folder_name(repo_id=repository, repo_type="model")


def download(repository: str, file: str, revision: str, sha256: str, limit_bytes: int | None) -> Path:
    if constants.is_offline_mode():
        raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    url = hub.hf_hub_url(repository, file, revision=revision)
    metadata = hub.get_hf_file_metadata(url)
    digest = metadata.etag or ""
    if not SHA256.fullmatch(digest):
        raise FetchError(
            f"{constants.ENDPOINT} states no SHA-256 for {repository}/{file}, so a download could not be verified."
        )
    if sha256 and digest != sha256:
        raise FetchError(
            f"{repository}/{file} is not the file of the catalogue: the hub states the SHA-256 {digest}, and the "
            f"catalogue {sha256}. To use the hub's file all the same: hf:{repository}/{file}"
        )
    if limit_bytes is not None and (metadata.size or 0) > limit_bytes:
        raise FetchError(
            f"{repository}/{file} has {(metadata.size or 0) / 1e9:.1f} GB, and models may take {limit_bytes / 1e9:.1f} "
            "GB of memory here. Take a smaller one (`stack models` lists what fits), or set run_anyway: true."
        )
    start_line = (
        f"Fetching {repository}/{file} ({(metadata.size or 0) / 1e6:.0f} MB, this once) from {constants.ENDPOINT}\n"
    )
    if (metadata.size or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE:
        sys.stderr.write(start_line)
        return download_largest(repository, file, revision, digest)
    blob = repo_folder(repository) / "blobs" / digest
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / repo_folder(repository).name / f"{digest}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with hub_utils.WeakFileLock(lock):
        if not blob.exists():  # another process may have fetched it meanwhile
            sys.stderr.write(start_line)
            partial = blob.with_name(f"{digest}.incomplete")
            download_partial(url, metadata, partial)
            check_digest(partial, digest)
            partial.replace(blob)
            sys.stderr.write(f"{Path(file).name} is there and verified.\n")
    # The library finds the blob and links it into the snapshot of the revision, as for every other tool.
    return Path(hub.hf_hub_download(repository, file, revision=revision))


def download_largest(repository: str, file: str, revision: str, digest: str) -> Path:
    """Download a file that the hub offers through its own transfer protocol only; such a download cannot continue."""
    path = Path(hub.hf_hub_download(repository, file, revision=revision))
    check_digest(path.resolve(), digest)
    return path


def download_partial(url: str, metadata: Any, partial: Path) -> None:
    """Download what is missing of the file. An attempt that brought bytes may be repeated: signed URLs expire, and a
    connection that breaks after an hour is no reason to begin again."""
    fruitless = 0
    while True:
        size = partial.stat().st_size if partial.exists() else 0
        check_disk(partial, metadata.size, size)
        try:
            with partial.open("r+b" if size else "wb") as target:
                if metadata.size is not None and size > metadata.size:
                    target.truncate(0)
                    size = 0
                target.seek(size)
                file_download.http_get(
                    metadata.location,
                    target,
                    resume_size=size,
                    headers=download_headers(url, metadata.location),
                    expected_size=metadata.size,
                    displayed_filename=partial.name[:12],
                    tqdm_class=find_progress_class(),
                )
        except (httpx2.HTTPError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno in DISK_ERRORS:
                raise
            grown = partial.stat().st_size > size
            fruitless = 0 if grown else fruitless + 1
            if fruitless >= MAX_FRUITLESS_ATTEMPTS or not is_passing(exc):
                raise
            metadata = hub.get_hf_file_metadata(url)
        else:
            return


def is_passing(exc: Exception) -> bool:
    """True for errors that another attempt with a fresh URL may not meet."""
    if isinstance(exc, errors.HfHubHTTPError):
        return exc.response.status_code in (403, 408, 429) or exc.response.status_code >= 500
    return True


def download_headers(url: str, location: str) -> dict[str, str]:
    headers = hub_utils.build_hf_headers()
    if urlsplit(url).netloc != urlsplit(location).netloc:
        headers.pop("authorization", None)  # a signed URL of a content network; the token is the hub's alone
    return headers


def check_disk(partial: Path, size_bytes: int | None, present_bytes: int) -> None:
    missing = (size_bytes or 0) - present_bytes
    free = shutil.disk_usage(partial.parent).free
    if missing and free < missing + SPARE_DISK_BYTES:
        raise FetchError(
            f"{missing / 1e9:.2f} GB are missing and {partial.parent} has {free / 1e9:.2f} GB free. Free some (`stack "
            "models` shows the models' sizes), or set HF_HOME to a folder on another disk."
        )


def verify_once(path: Path, sha256: str, marks: Path) -> None:
    """Verify a file that another tool may have downloaded, once for each size and time of it."""
    blob = path.resolve()
    digest = sha256 or (blob.name if SHA256.fullmatch(blob.name) else "")
    if not digest or is_marked(blob, marks):
        return
    sys.stderr.write(f"Verifying {path.name}\n")
    check_digest(blob, digest, remove=False)
    mark_verified(path, marks)


def check_digest(path: Path, expected: str, *, remove: bool = True) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() == expected:
        return
    if remove:
        path.unlink()
    raise FetchError(
        f"The file does not have the SHA-256 that it should have ({digest.hexdigest()}, expected {expected}); it was "
        + ("removed. Try again." if remove else f"not used. Remove {path} and fetch it again.")
    )


def mark_of(path: Path, marks: Path) -> Path:
    status = path.stat()
    name = f"{path}:{status.st_size}:{status.st_mtime_ns}"
    return marks / hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def is_marked(path: Path, marks: Path) -> bool:
    return mark_of(path, marks).exists()


def mark_verified(path: Path, marks: Path) -> None:
    with contextlib.suppress(OSError):  # without the mark, the next start verifies the file again
        marks.mkdir(parents=True, exist_ok=True)
        mark_of(path.resolve(), marks).touch()


def list_cache() -> dict[str, Any]:
    """Return the folder of the cache and its GGUF files, each once, with the bytes that they take."""
    return {"folder": constants.HF_HUB_CACHE, "files": list_files()}


def list_files() -> list[dict[str, Any]]:
    try:
        repositories = hub.scan_cache_dir().repos
    except errors.CacheNotFound:
        return []
    files: dict[str, dict[str, Any]] = {}
    for repository in repositories:
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            for file in revision.files:
                if file.file_name.endswith(".gguf"):
                    name = file.file_path.relative_to(revision.snapshot_path).as_posix()
                    row = {"repository": repository.repo_id, "file": name, "size_bytes": file.size_on_disk}
                    files[f"{file.blob_path}:{name}"] = {**row, "path": str(file.file_path)}
    return sorted(files.values(), key=lambda row: (row["repository"], row["file"]))


def remove(repository: str, file: str) -> int:
    """Remove the file of every revision, and its blob unless another file is the same; return the bytes that became
    free. An unfinished download of the repository goes, too."""
    folder = repo_folder(repository)
    pointers = [Path(path) for path in glob.glob(str(folder / "snapshots" / "*" / glob.escape(file)))]
    blobs = {pointer.resolve() for pointer in pointers}
    for pointer in pointers:
        pointer.unlink()
    in_use = {path.resolve() for path in (folder / "snapshots").rglob("*") if path.is_symlink()}
    freed = 0
    for blob in [*blobs, *folder.glob("blobs/*.incomplete")]:
        if blob not in in_use and blob.exists():
            freed += blob.stat().st_size
            blob.unlink()
    if folder.exists() and not in_use and not any(path.is_file() for path in (folder / "snapshots").rglob("*")):
        shutil.rmtree(folder)
    return freed


def find_progress_class() -> Any:
    """Return the bar that shows a download; None for the library's own, on a terminal."""
    if Report.output is not None:
        return Report
    return None if sys.stderr.isatty() else ProgressLines


class Report:
    """Progress in lines of JSON for the parent, one for each piece. Has the part of tqdm that is used."""

    output: IO[str] | None = None

    def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
        self._done = initial

    def update(self, count: float = 1) -> None:
        self._done += int(count)
        if self.output is not None:
            self.output.write(json.dumps({"done_bytes": self._done}) + "\n")
            self.output.flush()

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the last line is that of the result."""


class ProgressLines:
    """Progress as one line for each tenth, for outputs that are no terminal. Has the part of tqdm that is used."""

    def __init__(self, *_: object, total: int | None = None, initial: int = 0, **__: object) -> None:
        self._total = total or 0
        self._done = initial
        self._tenth = self._done * 10 // self._total if self._total else 0

    def update(self, count: float = 1) -> None:
        self._done += int(count)
        tenth = self._done * 10 // self._total if self._total else 0
        if tenth != self._tenth:
            self._tenth = tenth
            sys.stderr.write(f"  {tenth * 10:3d} % of {self._total / 1e6:.0f} MB\n")

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: a line needs no end."""


def describe_hub_error(exc: Exception, repository: str, file: str, revision: str) -> str:
    page = f"{constants.ENDPOINT}/{repository}"
    match exc:
        case errors.GatedRepoError():
            return f"{repository} is gated. Accept its terms at {page}, and set HF_TOKEN to a token of that account."
        case errors.RevisionNotFoundError():
            return f"{repository} has no revision {revision}. See {page}"
        case errors.RemoteEntryNotFoundError():
            return f"{repository} has no file {file} at {revision}. See {page}/tree/{revision}"
        case errors.RepositoryNotFoundError():
            return (
                f"There is no repository {repository} at {constants.ENDPOINT}, or HF_TOKEN may not read it. See {page}"
            )
        case errors.OfflineModeIsEnabled():
            return (
                f"{repository}/{file} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set. Unset "
                f"it, or copy the cache of a machine that has the file.{name_local_files()}"
            )
        case errors.HfHubHTTPError():
            status = exc.response.status_code
            hint = " Is HF_TOKEN valid?" if status in (401, 403) else ""
            return f"{constants.ENDPOINT} answered with HTTP status {status} for {repository}/{file}.{hint}"
        case errors.FileMetadataError():
            return f"{constants.ENDPOINT} does not answer as a Hugging Face hub does. Is HF_ENDPOINT right?"
        case _:
            return (
                f"{constants.ENDPOINT} cannot be reached ({type(exc).__name__}: {exc}). What was downloaded stays, and "
                "the next attempt continues there. Is there a network, and are HF_ENDPOINT and the proxy right?"
                f"{name_local_files()}"
            )


def name_local_files() -> str:
    """Return a sentence with the models that need no network: the first files of the cache, as a run config names
    them."""
    files = [f"hf:{row['repository']}/{row['file']}" for row in list_files()]
    more = f" and {len(files) - MAX_NAMED} more" if len(files) > MAX_NAMED else ""
    return f" On this machine are: {', '.join(files[:MAX_NAMED])}{more}." if files else ""


def describe_os_error(exc: OSError) -> str:
    if exc.errno in DISK_ERRORS:
        return (
            f"The disk of {constants.HF_HUB_CACHE} is full ({exc.strerror}). Free some space: what was downloaded "
            "stays, and the next attempt continues there. Or set HF_HOME to a folder on another disk."
        )
    return f"The cache {constants.HF_HUB_CACHE} cannot be used: {exc}"


ACTIONS = {"fetch": fetch, "list": list_cache, "remove": remove}

if __name__ == "__main__":
    main()
