"""Provider: the base of every concrete implementation of an API."""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict

UserPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""A path of a run config, in which a leading `~` is the home folder, as in a shell."""
UserPathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""UserPath as text, where names that are no path (":memory:") are allowed."""


class ProviderMetrics(Protocol):
    """A dataclass of numbers, by name. A name that ends in `_s` is in seconds; no name holds text of a client."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class Provider:
    """One class per backend, described once: its nested `Config` and its constructor's typed arguments.

    The constructor takes `config: Config` and, by annotation, the APIs it builds on: `inference: Inference` is the
    stack's own, `tools: ToolRuntime | None` may be absent from a run config, and `providers: Mapping[str, Inference]`
    is built from the field of that name in the provider's own Config. A parameter of the type `Tenants` receives the
    tenants of the run config. Construction does no I/O and starts nothing.
    """

    class Config(BaseModel):
        """Fields of the provider's section in a run config. Secrets are `SecretStr`, units are in the names."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    async def start(self) -> None:
        """Open connections and processes. Runs once, on the serving event loop, after all it depends on has started.

        Raises ConfigError if the config cannot work; then nothing stays open.
        """

    async def close(self) -> None:
        """Release everything `start` opened; safe to call when `start` failed or never ran."""

    def confinement(self) -> str | None:
        """Return one line about what holds the untrusted programs or files that the provider runs or parses, or None
        if there are none. Called after `start`, to be shown to the operator."""
        return None

    async def describe_secrets(self) -> str | None:
        """Return one line about how the provider keeps the secrets that clients store, or None if it keeps none. Called
        after `start`, to be shown to the operator."""
        return None

    def shared_use_risk(self) -> str | None:
        """Return why several tenants must not share the provider, with the remedy, or None if they may. Called after
        `start`; the answer keeps a server with several tenants from starting."""
        return None

    def machine_bound_state(self) -> str | None:
        """Return what the provider holds on this machine alone, with the remedy for several machines, or None if it
        holds nothing. Shown to the operator of a store that several machines share."""
        return None

    def metrics(self) -> ProviderMetrics | None:
        """Return the numbers of the provider for its operator, or None if it has none.

        Called on the event loop between `start` and `close`, for every scrape, and with several workers every second:
        it must cost next to nothing.
        """
        return None
