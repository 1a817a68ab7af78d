"""The command `stack check`: build and start what a run config names, and let its models generate."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final

from apis.chat import ChatRequest
from apis.errors import ConfigError, InvalidRequest, NotFound
from apis.inference import Inference, Model
from stack.build import (
    confinement_lines,
    describe_machines,
    locate_errors,
    machine_lines,
    open_stack,
    secret_lines,
)
from stack.config import StackConfig
from stack.wiring import ProviderSpec, load_wired_config, wiring_lines

# Providers bound their own starts; this bounds their sum, in which a model may have to be fetched.
_TIMEOUT_S: Final = 3600.0
_MAX_LISTED_MODELS = 20
_MAX_TRIED_MODELS = 3


def check(file: str, write_line: Callable[[str], None], models: Sequence[str] = ()) -> None:
    """Build and start the stack of `file`, list its models, let the first ones generate a token, close it, and write a
    line about each step. `models` replace those of the inference section.

    Raises ConfigError, and StackError if a service that the stack needs cannot be reached.
    """
    config, specs = load_wired_config(file, models=models)
    asyncio.run(_check(config, specs, write_line))


async def _check(config: StackConfig, specs: Mapping[str, ProviderSpec], write_line: Callable[[str], None]) -> None:
    for line in wiring_lines(specs):
        write_line(line)
    try:
        async with asyncio.timeout(_TIMEOUT_S), open_stack(config) as stack:
            with locate_errors(config, "inference"):
                listed = sorted(await stack.inference.models(), key=lambda model: model.id)
                for model in listed[:_MAX_TRIED_MODELS]:
                    await _generate_one_token(stack.inference, model)
                models = [model.id for model in listed]
            for line in (*confinement_lines(stack), *await secret_lines(stack), *machine_lines(stack)):
                write_line(line)
            write_line(f"{'machines':<14}{describe_machines(stack)}")
    except TimeoutError as exc:
        raise ConfigError(f"{config.source}: not everything started and answered in {_TIMEOUT_S:.0f} seconds.") from exc
    named = ", ".join(models[:_MAX_LISTED_MODELS]) or "none yet"
    more = f" and {len(models) - _MAX_LISTED_MODELS} more" if len(models) > _MAX_LISTED_MODELS else ""
    write_line(f"{'models':<14}{named}{more}")
    write_line(f"{config.source} is ready to run.")


async def _generate_one_token(inference: Inference, model: Model) -> None:
    """Let `model` answer, unless it is only for embeddings. Raises ConfigError with the error of the provider.

    A file of embeddings, a chat template that the server lacks or a prompt format that the model does not know is found
    here and not by the first client.
    """
    if model.embedding_dimensions is not None:
        return
    message = {"role": "user", "content": "Hi"}
    request = ChatRequest.model_validate({"model": model.id, "messages": [message], "max_completion_tokens": 16})
    try:
        async with aclosing(inference.chat(request)) as batches:
            await anext(batches, None)
    except NotFound:
        return  # listed, but not for chats
    except InvalidRequest as exc:
        raise ConfigError(f"the model {model.id} does not answer: {exc.message}") from exc
