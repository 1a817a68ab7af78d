"""Text completions on llama.cpp: what the engine can honour of a request."""

from apis.chat import refuse_engine_options
from apis.completions.completion import CompletionRequest
from apis.errors import Unsupported


def check_completion(request: CompletionRequest) -> None:
    """Raise Unsupported naming a field that the engine cannot honour. It makes one completion of one prompt; a prompt
    of more than the context is refused by the engine itself."""
    refuse_engine_options(request)
    for name in ("n", "echo", "suffix", "logprobs", "stop_token_ids", "repetition_penalty"):
        if (value := getattr(request, name)) is not None and (name, value) not in (("n", 1), ("echo", False)):
            raise Unsupported(f"'{name}' is not supported by the local engine in text completions.", param=name)
    if request.prompt_count > 1:
        raise Unsupported("The local engine completes one prompt per request.", param="prompt")


def limit_completion(request: CompletionRequest, max_output_tokens: int) -> CompletionRequest:
    """Return the request with a limit of its output, `max_output_tokens` where it has none."""
    bound = max_output_tokens if request.max_tokens is None else request.max_tokens
    return request.model_copy(update={"max_tokens": bound})
