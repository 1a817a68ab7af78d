"""The command `stack files move`: the bytes of all files go to where another run config keeps files."""

import asyncio
from collections.abc import Callable
from typing import Any

from apis.errors import ConfigError
from apis.imports import import_from_string
from apis.storage.kv_store import KVStore
from stack.build import open_providers
from stack.config import StackConfig
from stack.wiring import ProviderSpec, load_wired_config

LoadedFiles = tuple[StackConfig, dict[str, ProviderSpec]]


def move(file: str, target: str, show: Callable[[str], None]) -> str:
    """Move the bytes of all files of the run config `file` to where the run config `target` keeps them; return a line
    about it. `show` is given lines about the progress. Raises ConfigError and StackError."""
    loaded, target_loaded = _load(file), _load(target)
    if _describe_store(loaded) != _describe_store(target_loaded):
        raise ConfigError(
            f"{target_loaded[0].source}: kv_store: must be that of {loaded[0].source}, which has the records of the "
            "files. Their bytes alone are moved."
        )
    return asyncio.run(_move(loaded, target_loaded, show))


def _load(file: str) -> LoadedFiles:
    config, specs = load_wired_config(file)
    if "files" not in specs:
        raise ConfigError(f"{config.source}: files: is required. Add the section files.")
    if config.kv_store.provider == "memory":
        raise ConfigError(f"{config.source}: kv_store.provider: memory ends with its process and its files.")
    return config, specs


def _describe_store(loaded: LoadedFiles) -> Any:
    spec = loaded[1]["kv_store"]
    return spec.name, spec.config


async def _move(loaded: LoadedFiles, target_loaded: LoadedFiles, show: Callable[[str], None]) -> str:
    async with (
        open_providers(*loaded, ("files",), started=KVStore) as (live, _),
        open_providers(*target_loaded, ("files",), started=KVStore) as (target_live, _),
    ):
        move_files = import_from_string("providers.files.moving:FileMove")
        return await move_files(live["files"], target_live["files"], show).run()
