"""What gpt-oss generates, token by token, as deltas. Takes whatever a model may write: it never raises.

A message is a header up to `<|message|>`, then a body up to a token that ends it. What does not follow that grammar is
put right and counted: a header that is none was text, a body that was not ended is ended by the next header.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Final, Literal

from apis.chat import ChatRequest
from apis.deltas import Delta, Finish, FinishReason, TokenLogprob, Usage
from providers.inference.harmony.bodies import Body, Called, Ignored, Outlet, Said
from providers.inference.harmony.header import Header, ids_to_header, recipient_to_callee
from providers.inference.harmony.token_cache import Memo
from providers.inference.harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FIRST_SPECIAL,
    MESSAGE,
    RETURN,
    START,
    Vocabulary,
)

MAX_HEADER_TOKENS: Final = 256
MAX_UNMARKED_BYTES: Final = {False: 32, True: 160}
"""Of text where a header should be, without or with a role, before it is taken for text."""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class HarmonyReader:
    """Reads one generation, which begins right after `<|start|>assistant`.

    `stopped` says that nothing more is wanted: a stop string of the request was met in the answer, or a call broke off.
    `repairs` counts what had to be put right. With a memo, each well-formed message is remembered with its very ids.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        request: ChatRequest,
        memo: Memo | None = None,
        *,
        call_ids: Callable[[], str] = new_call_id,
    ) -> None:
        self.stopped = False
        self.output_tokens = 0
        self.reasoning_tokens = 0
        self.repairs = 0
        self._vocabulary = vocabulary
        self._tools = request.tools or []
        self._stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self._memo = memo
        self._call_ids = call_ids
        self._opening = (START, *vocabulary.encode("assistant"))
        self._ids = [*self._opening]
        self._header: list[int] | None = []
        self._has_role = False
        self._body: Body | None = None
        self._well_formed = True
        self._called = False
        self._cut = False
        self._finished = False
        self._out = Outlet()

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None] = ()) -> list[Delta]:
        """What these tokens make certain. The token that ends the generation is to be fed too: it tells a whole call
        from one that was cut off. `logprobs`, where given, are those of the ids."""
        for index, token in enumerate(ids):
            if self.stopped or self._finished:
                break
            self.output_tokens += 1
            if not 0 <= token < FIRST_SPECIAL:
                self._control(token)
            elif self._body is None:
                self._header_token(token)
            else:
                self._body_token(self._body, token, logprobs[index] if index < len(logprobs) else None)
        return self._out.take()

    def finish(self, reason: Literal["stop", "length"], *, input_tokens: int, cached_tokens: int) -> list[Delta]:
        """What is still held back, and the Finish; nothing at a second call.

        It is `tool_calls` if there was a call, and `length` if one did not end in its own token, whatever else ended
        it: only that token says that the call is meant as it stands.
        """
        if self._finished:
            return []
        self._finished = True
        self._interrupt(at_end=True)
        usage = Usage(input_tokens, self.output_tokens, cached_tokens, self.reasoning_tokens)
        reason_: FinishReason = "length" if self._cut else "tool_calls" if self._called and reason == "stop" else reason
        return [*self._out.take(), Finish(reason_, usage)]

    def _control(self, token: int) -> None:
        self._ids.append(token)
        if token == START:
            self._interrupt()
            self._ids, self._well_formed = [START], True
            self._header, self._has_role = [], True
        elif token == MESSAGE and self._body is None:
            self._open(self._read_header())
        elif token in (END, CALL, RETURN):
            self._salvage(ended=True)
            self._close(token)
        elif token in (CHANNEL, CONSTRAIN) and self._header is not None:
            self._repair(token in self._header)
            self._header.append(token)
        elif token == CHANNEL:
            self._interrupt()
            self._begin(token)
        else:
            self._repair()

    def _interrupt(self, *, at_end: bool = False) -> None:
        """Something else begins, or nothing follows, where the message should have gone on."""
        self._repair(not at_end and (bool(self._header) or self._body is not None))
        self._salvage(ended=False)
        self._close(None)

    def _begin(self, token: int) -> None:
        """A header that no `<|start|>` announced."""
        self._ids = [*self._opening, token]
        self._header, self._has_role = [token], False
        self._repair()

    def _header_token(self, token: int) -> None:
        if self._header is None:
            self._begin(token)
            return
        self._ids.append(token)
        self._header.append(token)
        if len(self._header) > MAX_HEADER_TOKENS or (CHANNEL not in self._header and self._is_text(self._header)):
            self._salvage(ended=True)

    def _is_text(self, header: list[int]) -> bool:
        text = b"".join(map(self._vocabulary.decode_bytes, header))
        return len(text) > MAX_UNMARKED_BYTES[self._has_role] and b"to=" not in text

    def _read_header(self) -> Header:
        header = ids_to_header(self._vocabulary, self._header or [], has_role=self._has_role)
        self._header = None
        return header

    def _salvage(self, *, ended: bool) -> None:
        """A header that no `<|message|>` ends: text, or a call without arguments. One that was cut off is only text if
        it has more than a word: one may have been about to become a role, a channel or a recipient."""
        if not self._header:
            self._header = None
            return
        header = self._read_header()
        self._repair(ended)
        if len(header.text.split()) > (not ended) or (header.recipient is not None and ended):
            self._open(header)
            if self._body is not None and header.recipient is None:
                self._body.feed(header.text.encode(), self._out)
                self._check_stop(self._body)

    def _open(self, header: Header) -> None:
        self._repair(header.odd)
        if not header.ours:
            self._body = Ignored()
        elif header.recipient is None:
            self._body = Said(header.channel or "final", self._stops)
        else:
            callee = recipient_to_callee(header.recipient, self._tools)
            self._repair(callee.odd)
            self._body = Called(self._call_ids(), callee, header.content_type, self._out)

    def _body_token(self, body: Body, token: int, logprob: TokenLogprob | None) -> None:
        self._ids.append(token)
        self.reasoning_tokens += isinstance(body, Said) and body.channel == "analysis"
        body.feed(self._vocabulary.decode_bytes(token), self._out, logprob)
        self._check_stop(body)

    def _check_stop(self, body: Body) -> None:
        if body.stopped:
            self.stopped = True
            self._body = None

    def _close(self, mark: int | None) -> None:
        """The body ends, by a mark or for want of one."""
        body, self._body = self._body, None
        if body is None:
            return
        body.finish(self._out)
        if isinstance(body, Called):
            whole = mark == CALL
            self._called = self._called or whole
            self._cut = self.stopped = self._cut or not whole
            self._repair(not whole)
        key = body.key()
        ends_well = mark == body.mark_wanted or (mark == RETURN and isinstance(body, Said) and body.channel == "final")
        if self._memo is not None and key is not None and self._well_formed and ends_well:
            self._memo.put(key, [*self._ids[:-1], body.mark_wanted])

    def _repair(self, needed: bool = True) -> None:  # noqa: FBT001 - a condition, not a mode
        self.repairs += needed
        self._well_formed = self._well_formed and not needed
