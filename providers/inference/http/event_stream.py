"""Server-sent events in: bytes as a socket gives them -> the data of each whole event.

Follows the HTML standard's event stream format (https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

from typing import Final

from apis.errors import UpstreamError

MAX_EVENT_BYTES: Final = 8 * 1024 * 1024
BOM: Final = b"\xef\xbb\xbf"


class EventReader:
    """Feed it reads of any size; events come out once, whole, in order. An event cut off by the end is dropped."""

    __slots__ = (
        "_at_start",
        "_data",
        "_data_bytes",
        "_lines_end_in_cr",
        "_max_bytes",
        "_rest",
        "_rest_bytes",
        "_skip_lf",
    )

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._at_start = True
        self._lines_end_in_cr = False
        self._skip_lf = False
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, read: bytes) -> list[bytes]:
        """The data of every event that `read` completed. Raises UpstreamError for an event over the limit."""
        # what nearly all reads are while a model generates: one event of one line
        if (
            not self._at_start
            and not self._lines_end_in_cr
            and not self._rest
            and read.find(b"\n") == len(read) - 2
            and read.startswith(b"data: ")
            and len(read) > len(b"data: \n\n")
            and read.endswith(b"\n\n")
            and b"\r" not in read
        ):
            return [read[6:-2]]
        if self._rest:
            read = self._join(read)
        if self._at_start:
            read = self._without_bom(read)
        if not read:
            return []
        if self._lines_end_in_cr or b"\r" in read:
            return self._feed_lines(read)
        end = read.rfind(b"\n\n")
        if end < 0:
            self._keep(read)
            return []
        if end + 2 < len(read):
            self._keep(read[end + 2 :])
        # What nearly all servers send, and worth being quick for: events of one `data: ` line each.
        if read.startswith(b"data: "):
            events = read[6:end].split(b"\n\ndata: ")
            if read.count(b"\n", 0, end) == 2 * len(events) - 2 and all(events):
                return events
        return [data for block in read[:end].split(b"\n\n") if (data := _block_data(block))]

    def _keep(self, rest: bytes) -> None:
        self._rest.append(rest)
        self._rest_bytes += len(rest)
        if self._rest_bytes > self._max_bytes:
            raise UpstreamError("The inference server sent an event that is larger than allowed.")

    def _join(self, read: bytes) -> bytes:
        """What was left over before `read`, or nothing while no line can have ended: keeps long lines linear."""
        if b"\n" not in read and b"\r" not in read and not self._at_start:
            self._keep(read)
            return b""
        read = b"".join((*self._rest, read))
        self._rest.clear()
        self._rest_bytes = 0
        return read

    def _without_bom(self, read: bytes) -> bytes:
        if len(read) < len(BOM) and BOM.startswith(read):
            self._keep(read)
            return b""
        self._at_start = False
        return read.removeprefix(BOM)

    def _feed_lines(self, read: bytes) -> list[bytes]:
        """The standard to the letter, for streams where a carriage return was seen: CR, LF and CRLF all end lines."""
        self._lines_end_in_cr = True
        if self._skip_lf:
            read = read.removeprefix(b"\n")
        self._skip_lf = read.endswith(b"\r")
        *lines, rest = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if rest:
            self._keep(rest)
        events: list[bytes] = []
        for line in lines:
            if line:
                self._add(line)
            elif self._data:
                if data := b"\n".join(self._data):
                    events.append(data)
                self._data.clear()
                self._data_bytes = 0
        return events

    def _add(self, line: bytes) -> None:
        data = _line_data(line)
        if data is None:
            return
        self._data.append(data)
        self._data_bytes += len(data)
        if self._data_bytes > self._max_bytes:
            raise UpstreamError("The inference server sent an event that is larger than allowed.")


def _line_data(line: bytes) -> bytes | None:
    """The value of a `data` field; None for every other field and for comments."""
    if line[:5] == b"data:":
        return line[6:] if line[5:6] == b" " else line[5:]
    return b"" if line == b"data" else None


def _block_data(block: bytes) -> bytes:
    return b"\n".join(data for line in block.split(b"\n") if (data := _line_data(line)) is not None)
