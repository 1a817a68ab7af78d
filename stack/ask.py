"""The command `stack ask`: one request to a running stack through the official client, printed as it streams."""

import os
from collections.abc import Callable

from openai import APIConnectionError, APIStatusError, AuthenticationError, OpenAI, OpenAIError

from apis.errors import UpstreamError


def ask(text: str, url: str, model: str | None, write: Callable[[str], None]) -> None:
    """Send `text` to the API at `url` and pass each delta of the answer to `write`.

    Raises UpstreamError with the server's own message, or with what to start where no server answers.
    """
    api_key = os.environ.get("OPENAI_API_KEY") or "none"
    try:
        with OpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
            model = model or next(listed.id for listed in client.models.list())
            _write_answer(client, model, text, write)
    except APIConnectionError as exc:
        raise UpstreamError(f"No server answers at {url}. Start one: stack run local") from exc
    except AuthenticationError as exc:
        raise UpstreamError(f"{url} needs one of its API keys: set OPENAI_API_KEY. It answered: {exc.message}") from exc
    except APIStatusError as exc:
        raise UpstreamError(f"{url} answered with {exc.status_code}: {exc.message}") from exc
    except StopIteration:
        raise UpstreamError(f"{url} lists no model.") from None
    except OpenAIError as exc:
        raise UpstreamError(f"{url}: {exc}") from exc


def _write_answer(client: OpenAI, model: str, text: str, write: Callable[[str], None]) -> None:
    with client.responses.create(model=model, input=text, stream=True, store=False) as events:
        for event in events:
            if event.type == "response.output_text.delta":  # noqa: SIM114 - each type has its own class
                write(event.delta)
            elif event.type == "response.refusal.delta":
                write(event.delta)
            elif event.type == "response.failed":
                error = event.response.error
                raise UpstreamError(error.message if error else "The response failed.")
