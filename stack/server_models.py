"""The models of a running server, as its catalog for Codex describes them, and whether it needs a key."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, AuthenticationError, OpenAI, OpenAIError
from pydantic import BaseModel, ConfigDict, Field

from apis.errors import ConfigError, UpstreamError

DEFAULT_KEY_VARIABLE: Final = "OPENAI_API_KEY"
NO_KEY: Final = "none"
"""The key for clients that demand one, where the server takes any."""
_MAX_LISTED: Final = 30


class ServedModel(BaseModel):
    """A model that answers chats. `model_dump` returns the whole entry of Codex's catalog."""

    model_config = ConfigDict(extra="allow", frozen=True)

    slug: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,512}$")
    context_window: int | None = Field(None, gt=0)
    input_modalities: list[str] = ["text"]


class _Catalog(BaseModel):
    models: list[ServedModel]


@dataclass(frozen=True, slots=True)
class Server:
    """A running stack at `url`, which ends with /v1. `key_variable` is None where it needs no key."""

    url: str
    key_variable: str | None
    models: Sequence[ServedModel]
    model: ServedModel
    """The model that the client uses unless its user chooses another one."""

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.url.removesuffix("/v1")


def read_server(url: str, key_variable: str | None, model: str | None) -> Server:
    """Read the models of the server; the API of an address without a path is at /v1. The key is only sent where the
    server needs one, or its variable is named.

    Raises UpstreamError, and ConfigError for a variable that is not set and for a model that the server does not have.
    """
    url = url.rstrip("/")
    if not urlsplit(url).path:
        url += "/v1"
    models = None if key_variable else read_models(url, None)
    if models is None:
        key_variable = key_variable or DEFAULT_KEY_VARIABLE
        models = read_models(url, key_variable)
    models = models or ()
    return Server(url, key_variable, models, choose_model(url, models, model))


def choose_model(url: str, models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """Return the model with this name, or the first one without a name. Raises UpstreamError and ConfigError."""
    if not models:
        raise UpstreamError(f"{url} lists no model that answers chats. Add one to its run config.")
    chosen = models[0] if name is None else next((model for model in models if model.slug == name), None)
    if chosen is None:
        names = [model.slug for model in models[:_MAX_LISTED]]
        more = f" and {len(models) - _MAX_LISTED} more" if len(models) > _MAX_LISTED else ""
        raise ConfigError(f"{url} has no model {name!r}. Choose with --model: {', '.join(names)}{more}.")
    return chosen


def read_models(url: str, key_variable: str | None, timeout_s: float = 30) -> Sequence[ServedModel] | None:
    """Return the models that answer chats; None where no key is sent and the server needs one. Raises UpstreamError and
    ConfigError."""
    key = read_key(key_variable) if key_variable else NO_KEY
    try:
        with OpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout_s) as client:
            answer = client.get("/models?client_version=0.0.0", cast_to=object)
        return _Catalog.model_validate(answer).models
    except APIConnectionError as exc:
        raise UpstreamError(f"No server answers at {url}. Start one: stack run local") from exc
    except AuthenticationError as exc:
        if key_variable is None:
            return None
        raise UpstreamError(
            f"{url} refuses the key in {key_variable}: {exc.message}. Put one of its keys there, or name the variable "
            "that has it: --key NAME"
        ) from exc
    except APIStatusError as exc:
        remedy = " The URL ends with /v1." if exc.status_code == 404 else ""
        raise UpstreamError(f"{url} answered with {exc.status_code}: {exc.message}.{remedy}") from exc
    except OpenAIError as exc:
        raise UpstreamError(f"{url}: {exc}") from exc
    except ValueError as exc:  # it is not JSON, or not a catalog
        raise UpstreamError(
            f"{url} answers, but GET /models?client_version= has no catalog of models. It is another server, or an "
            "older one: update it, or name the right one with --url."
        ) from exc


def read_key(variable: str) -> str:
    """Return the key in the environment variable. Raises ConfigError."""
    if not (variable.isascii() and variable.isidentifier()):
        raise ConfigError("--key is the name of an environment variable, not the key itself.")
    if key := os.environ.get(variable):
        return key
    raise ConfigError(f"The environment variable {variable} has no key. Set it: export {variable}=YOUR_KEY")
