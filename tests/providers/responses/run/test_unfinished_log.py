"""Logs that break off anywhere: their open items are closed so that the whole stream keeps the laws."""

import copy
import json
from typing import Any

import pytest

from apis.events import LoggedEvent
from providers.responses.run.unfinished_log import close_log
from tests.support.laws.legal_streams import LEGAL, USAGE, event, response
from tests.support.laws.stream_laws import check_stream

Json = dict[str, Any]
ERROR = {"code": "server_error", "message": "It stopped."}


def logged(events: list[Json]) -> list[LoggedEvent]:
    return [LoggedEvent(each["type"], json.dumps(each).encode()) for each in events]


@pytest.mark.parametrize("name", LEGAL)
def test_a_log_that_breaks_off_anywhere_is_closed_lawfully(name: str) -> None:
    whole: list[Json] = [each for each in LEGAL[name] if each["type"] != "error"]
    for length in range(2, len(whole)):
        replay = copy.deepcopy(whole[:length])
        if replay[-1]["type"] == "response.queued":
            continue
        broken = close_log(logged(replay))
        failed = response("failed", [*broken.items], error=ERROR, usage=USAGE)
        replay += [
            *broken.closing_events,
            event("failed", response=failed, sequence_number=broken.next_sequence_number),
        ]
        check_stream(replay)
