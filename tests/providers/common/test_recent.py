"""The memory of entries under names that callers choose is bounded."""

from mcp_types import JSONRPCRequest, JSONRPCResponse

from apis.chat import Message
from apis.errors import InvalidRequest
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.body import ChatDialect
from providers.inference.chat_completions.refusals import FORM_MAX_AGE_S, MAX_FORMED_MODELS, ArrangedChat, ChatForms
from providers.tool_servers.mcp.answers import AnswerMender
from tests.providers.inference.remote import chat_request


def test_the_oldest_entry_is_forgotten_first() -> None:
    entries = RecentEntries[str, int](2)
    entries["a"], entries["b"] = 1, 2
    assert entries.find("a") == 1
    entries["c"] = 3
    assert [*entries.items()] == [("a", 1), ("c", 3)]
    assert entries.find("b") is None


def test_requests_that_a_server_never_answers_are_forgotten() -> None:
    """A session of an MCP server may live for days, and its newest requests are still read."""
    mender = AnswerMender()
    for number in range(20_000):
        mender.note_request(JSONRPCRequest(jsonrpc="2.0", id=number, method="tools/call"))
    assert len(mender._methods) < 5000  # pyright: ignore[reportPrivateUsage]  # its size is seen nowhere else
    message = JSONRPCResponse(jsonrpc="2.0", id=19_999, result={"content": "text"})
    mender.mend(message)
    assert message.result["content"] == [{"type": "text", "text": "text"}]


async def test_forms_of_chats_are_remembered_for_the_newest_models() -> None:
    """A server without a complete list takes any name of a model."""
    forms = ChatForms()
    said = [Message(role=role, content="a") for role in ("user", "system", "user")]
    for number in range(MAX_FORMED_MODELS + 5):
        chat = ArrangedChat(chat_request(model=f"m{number}", messages=said), ChatDialect(), forms)
        assert chat.adapt(InvalidRequest("System message must be first."))
        chat.remember()
    assert len(forms) == MAX_FORMED_MODELS
    newest = ArrangedChat(chat_request(model=f"m{MAX_FORMED_MODELS}", messages=said), ChatDialect(), forms)
    assert [message.role for message in newest.request.messages] == ["system", "user", "user"]


def test_a_form_is_forgotten_after_a_time_however_often_it_serves() -> None:
    """The template of a model may have been exchanged: the plain form is tried again, and the form of today learned."""
    now = [0.0]
    forms = ChatForms(clock=lambda: now[0])
    said = [Message(role=role, content="a") for role in ("user", "system", "user")]

    def send(*, is_refused: bool) -> list[str]:
        chat = ArrangedChat(chat_request(messages=said), ChatDialect(), forms)
        sent = [message.role for message in chat.request.messages]
        assert not is_refused or chat.adapt(InvalidRequest("System message must be first."))
        chat.remember()
        return sent

    assert send(is_refused=True) == ["user", "system", "user"]
    for _ in range(10):
        now[0] += FORM_MAX_AGE_S / 10
        assert send(is_refused=False) == ["system", "user", "user"]
    now[0] += 1
    assert send(is_refused=False) == ["user", "system", "user"]
    assert send(is_refused=True) == ["user", "system", "user"]
    assert send(is_refused=False) == ["system", "user", "user"]
