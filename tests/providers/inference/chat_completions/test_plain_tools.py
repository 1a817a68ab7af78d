"""What only a specially trained model takes is refused by name elsewhere."""

import pytest

from apis.chat import ChatRequest
from apis.errors import Unsupported
from providers.inference.chat_completions.plain_tools import require_plain_tools

FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "browser"}, "tools[1].type"),
        ({"type": "python"}, "tools[1].type"),
        ({"type": "function", "function": {"name": "f", "namespace": "crm"}}, "tools[1].function.namespace"),
    ],
)
def test_a_tool_that_the_model_cannot_know_is_an_unsupported_that_names_it(tool: object, param: str) -> None:
    request = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [FUNCTION, tool]}
    )
    with pytest.raises(Unsupported) as raised:
        require_plain_tools(request.tools)
    assert raised.value.param == param
