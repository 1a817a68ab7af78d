"""The walk through the code in ARCHITECTURE.md is the way of a request."""

import re
import sys
from types import FrameType
from typing import Any

from tests.support.laws.source_trees import ROOT
from tests.support.servers.serving import serving
from tests.support.servers.upstream_server import UpstreamServer, stream, text_chunks


def documented_files() -> list[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## A walk: one streamed request")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


async def test_a_streamed_request_enters_the_files_of_the_walk_in_their_order() -> None:
    entered: dict[str, None] = {}
    prefix = f"{ROOT}/"

    def trace(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix):
            entered.setdefault(path.removeprefix(prefix))

    async with (
        UpstreamServer(stream(text_chunks("Hel", "lo"))) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url}) as served,
    ):
        create: Any = served.client.responses.create
        for tracer in (None, trace):  # the first request reads what later ones remember
            sys.setprofile(tracer)
            try:
                async with await create(model="fake-model", input="hi", stream=True) as events:
                    assert [event.type async for event in events][-1] == "response.completed"
            finally:
                sys.setprofile(None)
    walk = documented_files()
    assert len(walk) > 20
    assert [path for path in entered if path in walk] == walk
