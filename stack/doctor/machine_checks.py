"""The checks of this machine: whether a stack can run here, with which sandbox and which models."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from apis.confinement.bubblewrap import BubblewrapUnavailable, build_isolation_command
from apis.errors import ConfigError, StackError
from providers.inference.model_files.library import GgufLibrary, LibraryListing, LibraryModel
from stack.doctor.finding import Finding
from stack.server_config import HttpServerConfig
from stack.server_models import read_models
from stack.serving.listener import bind_listener

_MIN_FREE_BYTES: Final = 2_000_000_000
_SANDBOX_TIMEOUT_S: Final = 20
_ANSWER_TIMEOUT_S: Final = 3


async def check_machine(model: str | None, server: HttpServerConfig) -> AsyncGenerator[Finding]:
    """Check bubblewrap, the port of `server`, the folder of the store, the disk of the models, and the memory for
    `model`, or for any."""
    yield await asyncio.to_thread(_check_bubblewrap)
    yield await asyncio.to_thread(_check_port, server)
    yield await asyncio.to_thread(_check_folder)
    try:
        listing = await GgufLibrary().list_models()
    except (ConfigError, StackError) as exc:
        yield Finding("engine", "warning", f"only models on other servers can be used, as in `stack run vllm`: {exc}")
        return
    yield _check_disk(listing)
    yield _check_memory(listing, model)


def find_sandbox_fault() -> str:
    """Return why programs of tools cannot run in bubblewrap on this machine, and the remedy; empty where they can."""
    try:
        command = [*build_isolation_command({}, []), "/usr/bin/true"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SANDBOX_TIMEOUT_S, check=False)  # noqa: S603 - a constant
        fault = "" if ran.returncode == 0 else ran.stderr.strip() or f"it ended with {ran.returncode}"
    except BubblewrapUnavailable as exc:
        fault = str(exc)
    except (OSError, subprocess.TimeoutExpired) as exc:
        fault = f"it does not start: {exc}"
    if not fault:
        return ""
    return (
        f"{fault}. Without it the code interpreter and the shell do not run. It also needs unprivileged user "
        "namespaces: sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0"
    )


def _check_bubblewrap() -> Finding:
    if fault := find_sandbox_fault():
        return Finding("bubblewrap", "warning", fault)
    return Finding("bubblewrap", "ok", "programs of tools can run in a sandbox")


def _check_port(server: HttpServerConfig) -> Finding:
    address = f"{server.host}:{server.port}"
    try:
        bind_listener(server).close()
    except ConfigError as exc:
        url = f"http://{address}/v1"
        try:
            read_models(url, None, _ANSWER_TIMEOUT_S)
        except StackError:
            return Finding("port", "failed", str(exc))
        return Finding("port", "ok", f"a stack listens on {address} already. Check it: stack doctor {url}")
    return Finding("port", "ok", f"{address} is free")


def _check_folder() -> Finding:
    folder = Path.cwd()
    free_bytes = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding(
            "store",
            "failed",
            f"{folder} cannot be written, and responses.db would be there. Run the stack elsewhere, or set STACK_DB",
        )
    return _judge_space("store", str(folder), free_bytes, "Free some, or set STACK_DB to a file on another disk")


def _check_disk(listing: LibraryListing) -> Finding:
    remedy = "Remove models: stack models remove NAME. Or set HF_HOME to a folder on another disk"
    return _judge_space("disk", " and ".join(listing.folders), listing.disk_free_bytes, remedy)


def _judge_space(check: str, where: str, free_bytes: int, remedy: str) -> Finding:
    free = f"{where}: {free_bytes / 1e9:.1f} GB free"
    if free_bytes >= _MIN_FREE_BYTES:
        return Finding(check, "ok", free)
    return Finding(check, "failed", f"{free}, fewer than {_MIN_FREE_BYTES / 1e9:.0f} GB. {remedy}")


def _check_memory(listing: LibraryListing, name: str | None) -> Finding:
    models = {model.name: model for model in listing.models}
    fitting = [model.name for model in listing.models if model.fits]
    room = f"models may take {listing.memory_bytes / 1e9:.1f} GB of memory here"
    if name is None:
        suggested = next((model.name for model in listing.models if model.is_suggested), None)
        if suggested is None and not fitting:
            return Finding("memory", "failed", f"no listed model fits: {room}. Use a server elsewhere: stack run vllm")
        start = f"stack run local --model {suggested or fitting[0]}"
        return Finding("memory", "ok", f"{room}; {len(fitting)} of {len(models)} listed models fit. Start one: {start}")
    if name not in models:
        model_names = ", ".join(models)
        return Finding("memory", "failed", f"no model {name!r} is listed. Choose one: {model_names}")
    return _judge_model(models[name], room, fitting)


def _judge_model(model: LibraryModel, room: str, fitting: list[str]) -> Finding:
    if model.memory_bytes is None or model.fits is None:
        return Finding(
            "memory", "warning", f"{model.name}: its file does not say what it needs; {room}. Try: stack check"
        )
    needed = f"{model.name} needs {model.memory_bytes / 1e9:.1f} GB; {room}"
    if model.fits:
        return Finding("memory", "ok", needed)
    return Finding(
        "memory", "failed", f"{needed}. Choose one that fits: {', '.join(fitting) or 'none of the list does'}"
    )
