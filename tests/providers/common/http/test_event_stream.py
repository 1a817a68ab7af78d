"""EventReader against the HTML standard's event stream format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.errors import UpstreamError
from providers.common.net.http.event_stream import EventReader

STREAMS: dict[str, tuple[bytes, list[bytes]]] = {
    "the usual form": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "no space behind the colon": (b"data:a\n\ndata:b\n\n", [b"a", b"b"]),
    "only one space is taken off": (b"data:  a\n\n", [b" a"]),
    "carriage returns": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "both": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "mixed line ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\n", [b"a", b"b", b"c"]),
    "line feeds first, carriage returns later": (
        b"data: a\n\ndata: b\ndata: c\r\n\r\ndata: d\n\n",
        [b"a", b"b\nc", b"d"],
    ),
    "a byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "only the first mark is one": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [b"b"]),
    "comments": (b": hi\n\n:\n\ndata: a\n: there\n\n: ping\n\n", [b"a"]),
    "other fields": (b"event: x\nid: 1\nretry: 5\ndata: a\n\nevent: y\n\n", [b"a"]),
    "data of several lines": (b"data: a\ndata:\ndata: b\n\n", [b"a\n\nb"]),
    "no data at all": (b"data\n\ndata:\n\ndata: \n\ndata: a\n\n", [b"a"]),
    "blank lines in plenty": (b"\n\n\ndata: a\n\n\n\n\ndata: b\n\n\n", [b"a", b"b"]),
    "a field that only looks like data": (b"datum: x\n\n data: y\n\nDATA: z\n\n", []),
    "cut off by the end": (b"data: a\n\ndata: b\n", [b"a"]),
    "UTF-8": ("data: é😀\n\n".encode(), ["é😀".encode()]),
    "a data field within data": (b"data: x\\n\\ndata: y\n\n", [b"x\\n\\ndata: y"]),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_reads_the_same_whole_and_in_single_bytes_and_in_halves(name: str) -> None:
    raw, events = STREAMS[name]
    assert EventReader().feed(raw) == events
    one_by_one = EventReader()
    assert [data for at in range(len(raw)) for data in one_by_one.feed(raw[at : at + 1])] == events
    for cut in range(len(raw)):
        halves = EventReader()
        assert halves.feed(raw[:cut]) + halves.feed(raw[cut:]) == events


@given(
    st.lists(st.sampled_from([b"data: a", b"data:b", b"data", b":c", b"id: 1", b"\n", b"\r", b"\r\n", b"\n\n"])),
    st.data(),
)
def test_cuts_never_change_what_is_read(pieces: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    cut_reader = EventReader()
    events = [event for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) for event in cut_reader.feed(raw[a:b])]
    whole = EventReader()
    assert events == [event for at in range(len(raw)) for event in whole.feed(raw[at : at + 1])]


@pytest.mark.parametrize(
    "reads",
    [[b"data: " + b"x" * 200], [b"x" * 60] * 3, [b"data: x\n"] * 100, [b"data: 1234567890\r\n"] * 20],
    ids=["one long line", "a line in pieces", "many lines", "many lines, with carriage returns"],
)
def test_an_event_over_the_limit_is_refused(reads: list[bytes]) -> None:
    reader = EventReader(max_event_bytes=100)
    with pytest.raises(UpstreamError, match="larger than allowed"):
        [reader.feed(read) for read in reads]
