"""The command `stack files move`: the bytes of all files go to where another run config keeps files."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, cast

from apis.documents.files import Files
from apis.errors import ConfigError
from apis.imports import import_from_string
from apis.storage.kv_store import KVStore
from stack.build import build_providers, locate_errors
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
    async with AsyncExitStack() as entered:
        files: list[Files] = []
        for config, specs in (loaded, target_loaded):
            live, order = build_providers(config, specs, ("files",))
            for part, provider in order:
                if isinstance(provider, KVStore):
                    entered.push_async_callback(provider.close)
                    with locate_errors(config, part.path):
                        await provider.start()
            files.append(cast("Files", live["files"]))
        return await import_from_string("providers.files.moving:FileMove")(*files, show).run()
