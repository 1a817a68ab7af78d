"""The local engine, whose model may have a strict template: the form that it takes is learned once for all requests."""

from apis.chat import Message
from providers.common.net.http.client import HttpClient
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.refusals import ChatForms
from providers.inference.llama_cpp.client import EngineClient
from providers.inference.llama_cpp.engine import EngineAddress
from tests.providers.inference.remote import chat_request
from tests.providers.llama_cpp.asking import text_of
from tests.support.servers.upstream_server import (
    Answer,
    Received,
    UpstreamServer,
    error_answer,
    json_answer,
    stream,
    text_chunks,
)


def answer(received: Received) -> Answer:
    """Refuse instructions after the first message, as llama.cpp's server does, on each of its routes."""
    if "system" in [message["role"] for message in received.json["messages"]][1:]:
        return error_answer(500, "Jinja Exception: System message must be at the beginning.")
    return json_answer({"input_tokens": 7}) if "input_tokens" in received.path else stream(text_chunks("ok"))


async def test_a_form_is_learned_once_for_generating_and_for_counting() -> None:
    """Each request has a client of its own."""
    request = chat_request(messages=[Message(role=role, content="a") for role in ("user", "system", "user")])
    forms, http = ChatForms(), HttpClient(idle_s=0)
    async with UpstreamServer() as engine:
        engine.routes |= dict.fromkeys(("/v1/chat/completions", "/v1/chat/completions/input_tokens"), answer)
        address = EngineAddress(engine.base_url.removesuffix("/v1"), "key")
        try:
            for attempts in (2, 1):
                client = EngineClient(address, http, 5, RecentEntries(16), forms)
                assert text_of([delta async for batch in client.chat(request) for delta in batch]) == "ok"
                assert await client.count_tokens(request) == 7
                paths = [received.path for received in engine.received]
                assert paths == ["/v1/chat/completions"] * attempts + ["/v1/chat/completions/input_tokens"]
                engine.received.clear()
            assert await EngineClient(address, http, 5, RecentEntries(16), ChatForms()).count_tokens(request) == 7
        finally:
            await http.close()
