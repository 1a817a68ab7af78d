"""The models of the server as the catalog that Codex reads: its `GET /models?client_version=`, or a file of it."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, get_args

from apis.chat import ChatRequest
from apis.inference import Inference, Model
from apis.wire.base import Effort

CLIENT_VERSION: Final = "client_version"
"""The query parameter that Codex sends, and no other client."""
_TOOL_OUTPUT_TOKENS: Final = 10_000
"""Tokens of a tool's output that Codex keeps."""
_EFFORT_DESCRIPTIONS: Final = {
    "none": "No reasoning",
    "minimal": "Almost no reasoning",
    "low": "Short reasoning, fast answers",
    "medium": "Reasoning for everyday tasks",
    "high": "Long reasoning for hard tasks",
    "xhigh": "Very long reasoning",
    "max": "The longest reasoning",
}
_INSTRUCTIONS: Final = """\
You are a coding agent. You work in the user's terminal, in the folder of their project, with the tools of this session.

- Work until the task is done. Read the files that matter before you change them, and prefer `rg` for searching.
- Change files with the tool `apply_patch` if you have it. Keep to the code's style, and change what the task needs.
- Run the project's tests or the program after a change, and repair what fails.
- Files named AGENTS.md have instructions for their folder. Follow them. The user's own instructions come before them.
- Never undo changes that you did not make. Never commit or delete anything unless the user requests it.
- At the end, say in a few sentences what you did, where, and how you checked it. Say plainly what does not work.

A patch of `apply_patch` has this form. Lines begin with a space (unchanged), `-` (removed) or `+` (added):

*** Begin Patch
*** Update File: path/of/file.py
@@ def name_of_function():
 unchanged line
-old line
+new line
*** Add File: path/of/new_file.py
+its only line
*** Delete File: path/of/old_file.py
*** End Patch
"""


async def build_catalog(inference: Inference, models: Sequence[Model]) -> dict[str, Any]:
    """Return the catalog of the models that answer chats, in their order."""
    chat_models = [model for model in models if model.embedding_dimensions is None]
    efforts = await asyncio.gather(*(_find_efforts(inference, model.id) for model in chat_models))
    pairs = zip(chat_models, efforts, strict=True)
    return {"models": [_build_entry(model, own, place) for place, (model, own) in enumerate(pairs)]}


async def _find_efforts(inference: Inference, model: str) -> list[Effort]:
    """Return the different efforts that the model is shown, its default first; none where its server alone knows."""
    message = {"role": "user", "content": ""}
    request = ChatRequest.model_validate({"model": model, "messages": [message]})
    requests = (request, *(request.model_copy(update={"reasoning_effort": effort}) for effort in get_args(Effort)))
    efforts: list[Effort] = []
    for each in requests:
        used = await inference.used_effort(each)
        if used is not None and used not in efforts:
            efforts.append(used)
    return efforts


def _build_entry(model: Model, efforts: Sequence[Effort], place: int) -> dict[str, Any]:
    levels = sorted(efforts, key=get_args(Effort).index)
    return {
        "slug": model.id,
        "display_name": model.id,
        "description": f"{model.owned_by}, on a server of your own",
        "default_reasoning_level": efforts[0] if efforts else None,
        "supported_reasoning_levels": [
            {"effort": effort, "description": _EFFORT_DESCRIPTIONS[effort]} for effort in levels
        ],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": True,  # without, Codex sends no reasoning back
        "default_reasoning_summary": "auto",
        "support_verbosity": True,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",  # the grammar of its tool holds on every engine
        "web_search_tool_type": "text",
        "truncation_policy": {"mode": "tokens", "limit": _TOOL_OUTPUT_TOKENS},
        "supports_parallel_tool_calls": True,
        "supports_search_tool": False,
        "supports_image_detail_original": False,
        "include_apps_usage_instructions": False,
        "context_window": model.context_tokens,
        "max_context_window": model.context_tokens,
        "input_modalities": ["text", "image"] if "image" in (model.modalities or ()) else ["text"],
        "experimental_supported_tools": [],
    }
