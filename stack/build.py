"""From a StackConfig to live providers: built, started in the order of their needs, closed in reverse."""

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from apis.errors import ConfigError, StackError
from apis.fetcher import Fetcher
from apis.files import Files
from apis.inference import Inference
from apis.provider import Provider
from apis.responses import Responses
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolRuntime
from apis.vector_stores import VectorStores
from stack.config import StackConfig
from stack.wiring import APIS, Part, wire


@dataclass(frozen=True, slots=True)
class Stack:
    """The live providers of a run config, and `live`, all of them by their place in it. What may be None is so where
    the config has none."""

    config: StackConfig
    parts: Mapping[str, Part]
    inference: Inference
    responses: Responses
    kv_store: KVStore
    tool_runtime: ToolRuntime | None
    files: Files | None = None
    vector_stores: VectorStores | None = None
    fetcher: Fetcher | None = None
    live: Mapping[str, Provider] = field(default_factory=dict[str, Provider])


@asynccontextmanager
async def open_stack(config: StackConfig) -> AsyncGenerator[Stack]:
    """Build and start all that `config` names; on leaving, or when a start fails, close it, last started first.

    Raises ConfigError, and the StackError of a provider whose start needs what is not there.
    """
    parts = wire(config)
    live, order = build(config, parts)
    async with AsyncExitStack() as entered:
        for part, provider in order:
            # Before the start, because closing is promised to be safe after one that failed.
            entered.push_async_callback(provider.close)
            with blamed(config, part.path):
                await provider.start()
        yield Stack(
            config,
            parts,
            cast("Inference", live["inference"]),
            cast("Responses", live["responses"]),
            cast("KVStore", live["kv_store"]),
            cast("ToolRuntime | None", live.get("tool_runtime")),
            cast("Files | None", live.get("files")),
            cast("VectorStores | None", live.get("vector_stores")),
            cast("Fetcher | None", live.get("fetcher")),
            {part.path: provider for part, provider in order},
        )


@contextmanager
def blamed(config: StackConfig, path: str) -> Generator[None]:
    """Adds the file, and the place of the provider in it, to what a provider says is wrong."""
    try:
        yield
    except ConfigError as exc:
        message = str(exc)
        where = config.source if message.startswith(path) else f"{config.source}: {path}"
        raise ConfigError(f"{where}: {message}") from exc
    except StackError as exc:
        exc.add_note(f"{config.source}: {path}")
        raise


def build(config: StackConfig, parts: Mapping[str, Part]) -> tuple[dict[str, Provider], list[tuple[Part, Provider]]]:
    """The provider of each API, and all providers, members included, each after what it needs. Starts nothing.

    Raises ConfigError for a cycle and for an API that is needed and not there.
    """
    builder = _Builder(config.source, parts)
    for api in APIS:
        if api in parts:
            builder.shared(api, ())
    return builder.live, builder.order


class _Builder:
    def __init__(self, source: str, parts: Mapping[str, Part]) -> None:
        self._source = source
        self._parts = parts
        self.live: dict[str, Provider] = {}
        self.order: list[tuple[Part, Provider]] = []

    def shared(self, api: str, chain: tuple[Part, ...]) -> Provider:
        """The stack's one provider of `api`; `chain` is who asked for it, the outermost first."""
        if api not in self.live:
            part = self._parts[api]
            if part in chain:
                cycle = " -> ".join(str(link) for link in (*chain[chain.index(part) :], part))
                raise ConfigError(
                    f"{self._source}: the providers need each other in a circle: {cycle}. Choose another for one."
                )
            self.live[api] = self._make(part, chain)
        return self.live[api]

    def _make(self, part: Part, chain: tuple[Part, ...]) -> Provider:
        chain = (*chain, part)
        arguments: dict[str, Any] = {}
        for name, need in part.needs.items():
            if need.api in self._parts:
                arguments[name] = self.shared(need.api, chain)
            elif need.optional:
                arguments[name] = None
            else:
                asked = " -> ".join(str(link) for link in chain)
                raise ConfigError(f"{self._source}: {need.api}: is required by {asked}. Add the section {need.api}.")
        for name, members in part.members.items():
            arguments[name] = {key: self._make(member, chain) for key, member in members.items()}
        provider = cast("Any", part.make)(config=part.config, **arguments)
        self.order.append((part, provider))
        return cast("Provider", provider)
