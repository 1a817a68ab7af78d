"""The server imports the types of `openai` without its client, which is there all the same for those who use it."""

import subprocess
import sys

CODE = """
import sys
import stack.cli, stack.serving.launch, stack.http.app
from openai.types.responses import Response
assert "openai._client" not in sys.modules, "the client was imported"
assert "openai.types.fine_tuning" not in sys.modules, "all types were imported"
import openai
assert openai.types.responses.Response is Response
assert openai.OpenAI(api_key="k").api_key == "k"
from openai import AsyncOpenAI, types
assert types.Batch.__name__ == "Batch"
assert type(openai).__name__ == type(types).__name__ == "module"
try:
    openai.no_such_name
except AttributeError as exc:
    print(exc)
"""


def test_openai_is_executed_when_it_is_first_used() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "module 'openai' has no attribute 'no_such_name'\n"
