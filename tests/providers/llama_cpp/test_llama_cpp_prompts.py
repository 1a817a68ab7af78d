"""The instructions that small models get in addition to the conversation."""

from typing import Any

import pytest

from apis.chat import ChatRequest
from providers.inference.llama_cpp.prompts import add_verbosity, build_answer_messages


@pytest.mark.parametrize("before", [[], [{"role": "developer", "content": "Be kind."}]])
def test_verbosity_follows_the_instructions(before: list[dict[str, Any]]) -> None:
    fields = {"model": "m", "messages": [*before, {"role": "user", "content": "Hi"}]}
    plain = ChatRequest.model_validate(fields)
    for verbosity in (None, "medium"):
        request = plain.model_copy(update={"verbosity": verbosity})
        assert add_verbosity(request) is request
    for verbosity, words in (("low", "Keep the answer short"), ("high", "Make the answer detailed")):
        prompt = build_answer_messages(add_verbosity(plain.model_copy(update={"verbosity": verbosity})).messages)
        assert [message.role for message in prompt] == ["system", "user"]
        assert str(prompt[0].content).removeprefix("Be kind.\n\n").startswith(words)
        assert prompt[1:] == build_answer_messages(plain.messages)[-1:]
