"""Small requests to a LlamaCpp under test."""

from collections.abc import Sequence
from typing import Any

from apis.chat import ChatRequest
from apis.deltas import Delta, Finish, TextDelta, ToolArgumentsDelta, ToolCallStart
from apis.inference import Inference
from providers.inference.llama_cpp.provider import LlamaCpp
from tests.conformance.inference import drain

MODEL = "smollm2-135m-instruct"

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the current weather of a city.", "parameters": CITY},
}
LETTER = {
    "type": "object",
    "properties": {"to": {"type": "string", "enum": ["bob", "alice"]}, "urgent": {"type": "boolean"}},
    "required": ["to", "urgent"],
}
EMAIL = {
    "type": "function",
    "function": {"name": "send_email", "description": "Send an e-mail to a person.", "parameters": LETTER},
}


def small_config(**fields: Any) -> LlamaCpp.Config:
    """One thread and little memory."""
    return LlamaCpp.Config.model_validate({"threads": 1, "context_tokens": 2048, **fields})


def chat_request(content: str = "Say hi.", **fields: Any) -> ChatRequest:
    """A short question that costs little to answer."""
    messages = [{"role": "user", "content": content}]
    request = {"model": MODEL, "messages": messages, "max_completion_tokens": 16, "temperature": 0, **fields}
    return ChatRequest.model_validate(request)


async def ask(inference: Inference, content: str = "Say hi.", **fields: Any) -> list[Delta]:
    """The deltas of the answer, found to keep the laws."""
    return await drain(inference, chat_request(content, **fields))


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def call_of(deltas: Sequence[Delta]) -> tuple[str, str] | None:
    """Name and input of the one call, or None."""
    starts = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
    if not starts:
        return None
    assert len(starts) == 1
    return starts[0].name, "".join(delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta))


def finish_of(deltas: Sequence[Delta]) -> Finish:
    finish = deltas[-1]
    assert isinstance(finish, Finish)
    return finish
