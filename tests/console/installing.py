"""An inference with an installer that a test drives: how far the fetch is, how it ends, and what it brings."""

from collections.abc import Sequence
from dataclasses import replace

from apis.errors import Conflict, InvalidRequest
from apis.inference import Model
from apis.model_pulls import InstallableModel, ModelInstaller, ModelLibrary, ModelPull
from providers.inference.scripted import Scripted

GIB = 10**9
BETTER = InstallableModel("better-4b", "chat, vision", "MIT", 3 * GIB, 4 * GIB, None, True, False)
HUGE = InstallableModel("huge-120b", "chat", "MIT", 63 * GIB, 65 * GIB, "it needs 65.0 GB of memory", False, False)


class DrivenInstaller(ModelInstaller):
    """Knows two models; `pull` is the present fetch, which the test sets."""

    def __init__(self) -> None:
        self.pull: ModelPull | None = None
        self.installed: list[str] = []

    async def list_library(self) -> ModelLibrary:
        return ModelLibrary([BETTER, HUGE], "4 cores, 16 GB of memory free", 14 * GIB, 200 * GIB)

    async def begin_pull(self, name: str) -> ModelPull:
        if name != BETTER.name:
            raise InvalidRequest(f"The model '{name}' cannot be fetched.", param="name")
        if self.pull is not None and self.pull.status == "in_progress":
            raise Conflict("One model is fetched at a time.")
        self.pull = ModelPull(name, "in_progress", BETTER.size_bytes, GIB, 1.0, None)
        return self.pull

    async def find_pull(self) -> ModelPull | None:
        return self.pull

    async def cancel_pull(self) -> ModelPull | None:
        self.pull = replace(self.pull, status="cancelled") if self.pull else None
        return self.pull

    def end(self, error: str | None = None) -> None:
        assert self.pull is not None
        self.pull = replace(self.pull, status="failed" if error else "completed", error=error)
        if error is None:
            self.installed.append(self.pull.model)


class Installing(Scripted):
    """The scripted model, and those that were installed."""

    def __init__(self, config: Scripted.Config) -> None:
        super().__init__(config)
        self.driven = DrivenInstaller()

    async def models(self) -> Sequence[Model]:
        return [*await super().models(), *(Model(name, "tests") for name in self.driven.installed)]

    def installer(self) -> ModelInstaller | None:
        return self.driven
