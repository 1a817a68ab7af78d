"""The errors that a stack raises on purpose, and their form for clients.

Processes that need little import this module, so it imports nothing large.

StackError
├── InvalidRequest            400  the request itself is wrong; `param` names the field
│   ├── Unsupported           400  well-formed, but not offered here
│   │   └── CountingUnsupported 400  the model's server has no way to count the tokens of a prompt
│   ├── ContextLengthExceeded 400  the prompt does not fit the model
│   ├── SteeringRefused       400  the response takes no steering input; `code` says why
│   └── InvalidBeta           400  the header of a beta API is missing or names another one
├── Unauthorized              401  no key, or a wrong one
│   └── KeyRevoked            401  the key of queued work is no longer valid when it is its turn
├── PermissionDenied          403  this caller may not (a foreign Host or Origin, for one)
├── NotFound                  404  no such object, or one of another tenant
│   ├── AgentNotFound         404  no such agent, session, turn or item
│   └── ModelNotFound         404  no provider serves that model
├── MethodNotAllowed          405
├── ConversationLocked        409  a response runs in the conversation; retry when it has ended
├── ConversationLost          409  the server was cut off from the conversation during a response
├── Conflict                  409  the state of the object does not allow it now
├── IdempotencyKeyInUse       409  the first request with the key is still running
├── PayloadTooLarge           413
├── UnsupportedMediaType      415
├── ExternalConnectorError    424  an MCP server that the request declares cannot be used
├── RateLimited               429  `retry_after_s` when known
│   ├── TokenRateLimited      429  the limit is one of tokens
│   └── QuotaExceeded         429  the budget of a project is used up; trying again does not help
├── UpstreamError             502  a service that we depend on failed or did not answer
│   └── UpstreamTimeout       504  it took too long; the message says which limit
├── StoreUnavailable          503  the KVStore cannot be reached or cannot write
├── StorageCorrupt            500  a stored value is not as it was written; the log names its key
├── StoredValueTooLarge       413  a value is above the limit of the KVStore
├── Overloaded                503  shed before harm; retry later
├── ToolFailed                502  a tool failed; the model receives the error, not the client
│   ├── ImageRefused          400  the images server calls the request wrong
│   └── FetchFailed           502  a URL was refused, or did not answer within the limits
└── ConfigError                    start-up only, never reaches HTTP
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Final, Literal

FailureCode = Literal[
    "server_error",
    "rate_limit_exceeded",
    "invalid_prompt",
    "context_length_exceeded",
    "completion_window_expired",
    "api_key_revoked",
    "storage_unavailable",
]
"""The codes of a failed response. The SDK's type does not list the last four. OpenAI sends `context_length_exceeded`,
and agents compact their conversation when they read it."""

_MAX_NAMED_MODELS: Final = 10


class StackError(Exception):
    """An error with a message that is safe and useful to show to the caller."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    failure_code: ClassVar[FailureCode] = "server_error"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.repeats_work = False
        """True if sending the request again would repeat work that a model or a tool has already done."""
        self.is_of_receiver = False
        """True if the receiver of a stream raised it, not its source: the source is not to blame."""
        if code is not None:
            self.code = code


class InvalidRequest(StackError):
    """The request is wrong and will stay wrong."""

    status = 400
    type = "invalid_request_error"
    failure_code = "invalid_prompt"


class Unsupported(InvalidRequest):
    """The request is legal in the API, and this stack does not offer that feature."""

    code = "unsupported_parameter"


class CountingUnsupported(Unsupported):
    """The model's server cannot count the tokens of a prompt; it may answer the prompt all the same."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit into the model's context."""

    code = "context_length_exceeded"
    failure_code = "context_length_exceeded"


class SteeringRefused(InvalidRequest):
    """Steering input is not accepted, or no response could be created with it; `code` says why."""

    code = "steering_not_supported"


class InvalidBeta(InvalidRequest):
    """The API is a beta, and its header is missing or names another one."""

    type = "invalid_beta"
    code = "invalid_beta"


class Unauthorized(StackError):
    """The API key is missing or unknown."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class KeyRevoked(Unauthorized):
    """The key of work that was queued is no longer valid when it is its turn."""

    code = "api_key_revoked"
    failure_code = "api_key_revoked"


class PermissionDenied(StackError):
    """The caller is known and may not do this."""

    status = 403
    type = "permission_error"


class NotFound(StackError):
    """This tenant has no such object."""

    status = 404
    type = "invalid_request_error"
    failure_code = "invalid_prompt"


class AgentNotFound(NotFound):
    """The Agents API has no such object for this tenant."""

    type = "not_found_error"
    code = "not_found_error"


class ModelNotFound(NotFound):
    """No provider serves the model."""

    code = "model_not_found"

    def __init__(self, model: str, served: Iterable[str] = ()) -> None:
        """`served` are the ids of the models that exist; the message names the first ones."""
        names = sorted(served)[:_MAX_NAMED_MODELS]
        served_models = f" This server has: {', '.join(names)}." if names else ""
        super().__init__(f"The model '{model}' does not exist.{served_models}", param="model")


class MethodNotAllowed(StackError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"


class WindowExpired(StackError):
    """A background response had not begun when its completion window ended."""

    status = 503
    code = "completion_window_expired"
    failure_code = "completion_window_expired"


class ConversationLocked(StackError):
    """A conversation has one turn at a time, and one is running. SDKs retry by themselves."""

    status = 409
    type = "invalid_request_error"
    code = "conversation_locked"

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"A response is being made in the conversation '{conversation_id}'. Try again when it has ended.",
            param="conversation",
            retry_after_s=1,
        )


class ConversationLost(StackError):
    """The lock of a conversation was lost before its response ended, and nothing was added to the conversation."""

    status = 409
    type = "invalid_request_error"
    code = "conversation_lost"

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"This server was cut off from the conversation '{conversation_id}' for too long before the response "
            "ended. Nothing was added to it.",
            param="conversation",
        )


class Conflict(StackError):
    """The state of the object does not allow the request now."""

    status = 409
    type = "conflict_error"
    code = "conflict_error"


class IdempotencyKeyInUse(StackError):
    """Another request with this key is still running; its answer is available later."""

    status = 409
    type = "invalid_request_error"
    code = "idempotency_key_in_use"


class PayloadTooLarge(StackError):
    """The body is larger than the server's limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"
    failure_code = "invalid_prompt"


class UnsupportedMediaType(StackError):
    """The body is not application/json."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class ExternalConnectorError(StackError):
    """An MCP server that the request declares could not be asked for its tools; no model was called."""

    status = 424
    type = "external_connector_error"
    code = "http_error"


class RateLimited(StackError):
    """A limit of this server or of an upstream was reached."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    failure_code = "rate_limit_exceeded"


class TokenRateLimited(RateLimited):
    """A limit of tokens was reached."""

    type = "tokens"


class QuotaExceeded(RateLimited):
    """A budget was used up, until its administrator raises it or the next month begins."""

    type = "insufficient_quota"
    code = "insufficient_quota"


class UpstreamError(StackError):
    """An inference server or another service failed or did not answer."""

    status = 502


class UpstreamTimeout(UpstreamError):
    """An upstream took longer than a limit of the config; the message names the limit."""

    status = 504


class StoreUnavailable(StackError):
    """The KVStore cannot be reached, is too slow or cannot write."""

    status = 503
    code = "storage_unavailable"
    failure_code = "storage_unavailable"
    default_retry_after_s = 1


class StorageCorrupt(StackError):
    """A stored value is damaged. It stays in the store, and every request that needs it fails in the same way."""

    code = "storage_corrupt"

    def __init__(self, message: str = "A stored record cannot be read: it is damaged.") -> None:
        super().__init__(message)


class StoredValueTooLarge(StackError):
    """A value is too large for the KVStore; to send the request again would not help."""

    status = 413
    code = "storage_value_too_large"


class Overloaded(StackError):
    """The server refuses work that would exceed its capacity."""

    status = 503
    code = "overloaded"


class ToolFailed(StackError):
    """A tool failed. The message is for the model and holds no secret."""

    status = 502


class ImageRefused(ToolFailed):
    """The images server calls the request wrong, or does not allow its prompt; the message is its own."""

    status = 400
    type = "invalid_request_error"


class FetchFailed(ToolFailed):
    """A URL from outside was refused before any connection, or did not answer within the limits."""


class FetchRefused(FetchFailed):
    """The run config does not permit a URL. `reason` is the message without the setting that would permit it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} {remedy}")
        self.reason = reason


class ConfigError(Exception):
    """The run config or the environment is wrong. The message names the file, the path in it and the remedy."""


def internal_error(request_id: str) -> StackError:
    """Return the error that a client sees instead of a bug's own text."""
    return StackError(f"The server had an error while processing your request. Request id: {request_id}.")


def error_to_body(error: StackError) -> dict[str, Any]:
    """Return OpenAI's error body; all four keys are always present."""
    detail = {"message": error.message[:1024], "type": error.type, "param": error.param, "code": error.code}
    return {"error": detail}
