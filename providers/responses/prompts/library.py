"""PromptLibrary: the prompts of one stack, by id, and the rendering of the requests that refer to them."""

import asyncio
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from apis.errors import InvalidRequest
from apis.responses import CreateResponse
from apis.wire.prompt import PromptReference
from providers.responses.prompts.folder import load_folder
from providers.responses.prompts.rendering import RenderedPrompt, render_prompt
from providers.responses.prompts.template import StoredPrompt


class PromptLibrary:
    """Prompts of a folder, which `load` reads, or of a mapping. All tenants share them."""

    def __init__(self, prompts: Path | Mapping[str, StoredPrompt] | None) -> None:
        self.folder = prompts if isinstance(prompts, Path) else None
        self._templates: Mapping[str, StoredPrompt] = prompts if isinstance(prompts, Mapping) else {}

    async def load(self) -> None:
        """Read the folder, where there is one. Raises ConfigError for a file that is wrong."""
        if self.folder is not None:
            self._templates = await asyncio.to_thread(load_folder, self.folder)

    def rendering(self, request: CreateResponse) -> AbstractContextManager[CreateResponse]:
        """Return a context that yields the request with the prompt that it refers to; unchanged where it refers to
        none. Errors that leave the context name places in the request as its client sent it. Raises InvalidRequest,
        naming the field, for an unknown prompt or version and for wrong variables."""
        return nullcontext(request) if request.prompt is None else self._rendering(request, request.prompt)

    @contextmanager
    def _rendering(self, request: CreateResponse, reference: PromptReference) -> Generator[CreateResponse]:
        rendered = self._render(request, reference)
        with rendered.attribute_errors():
            yield rendered.request

    def _render(self, request: CreateResponse, reference: PromptReference) -> RenderedPrompt:
        template = self._templates.get(reference.id)
        if template is None:
            message = f"Invalid 'prompt.id': there is no prompt '{reference.id:.64}' on this server."
            raise InvalidRequest(message, param="prompt.id", code="invalid_value")
        name = reference.version or template.default
        version = template.versions.get(name)
        if version is None:
            message = f"Invalid 'prompt.version': the prompt '{reference.id}' has no version '{name:.64}'."
            raise InvalidRequest(message, param="prompt.version", code="invalid_value")
        return render_prompt(request, reference.model_copy(update={"version": name}), version)
