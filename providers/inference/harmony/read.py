"""Convert gpt-oss's output, token by token, into deltas. Accepts any tokens and never raises.

A message is a header up to `<|message|>`, then a body up to a token that ends it. Deviations are corrected and counted:
a header that is not one was text, a body without an end is ended by the next header.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final, Literal

from apis.chat import ChatRequest
from apis.deltas import Delta, Finish, FinishReason, TokenLogprob, Usage
from providers.common.counters import HARMONY_REPAIRS
from providers.inference.harmony.bodies import CallBody, DeferredBody, DeltaBuffer, IgnoredBody, MessageBody, TextBody
from providers.inference.harmony.header import (
    PARALLEL_RECIPIENTS,
    HarmonyHeader,
    ids_to_header,
    ids_to_open_header,
    recipient_to_callee,
)
from providers.inference.harmony.token_cache import TokenCache
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

_log = logging.getLogger(__name__)

MAX_HEADER_TOKENS: Final = 256
MAX_UNMARKED_BYTES: Final = {False: 32, True: 160}
"""Bytes of text in the place of a header, without and with a role, before it counts as text."""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class HarmonyReader:
    """Reader of one generation, which begins directly after `<|start|>assistant`.

    `is_stopped` says that the rest is not needed: the answer reached a stop string, or a call broke off. `repair_count`
    counts corrections. With a token cache, each well-formed message is stored with its exact ids.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        request: ChatRequest,
        token_cache: TokenCache | None = None,
        *,
        make_call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.is_stopped = False
        self.output_tokens = 0
        self.reasoning_tokens = 0
        self.repair_count = 0
        self._vocabulary = vocabulary
        self._tools = request.tools or []
        self._stop_strings = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self._stop_string: str | None = None
        self._token_cache = token_cache
        self._make_call_id = make_call_id
        self._assistant_start = (START, *vocabulary.encode("assistant"))
        self._message_ids = [*self._assistant_start]
        self._header_ids: list[int] | None = []
        self._has_role = False
        self._body: MessageBody | None = None
        self._is_well_formed = True
        self._has_call = False
        self._was_cut_off = False
        self._is_finished = False
        self._delta_buffer = DeltaBuffer()

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None] = ()) -> list[Delta]:
        """Return the deltas that these tokens make certain. The token that ends the generation must be included: it
        distinguishes a complete call from a truncated one. `logprobs`, if any, are those of the ids."""
        for index, token in enumerate(ids):
            if self.is_stopped or self._is_finished:
                break
            self.output_tokens += 1
            if not 0 <= token < FIRST_SPECIAL:
                self._handle_control_token(token)
            elif self._body is None:
                self._handle_header_token(token)
            else:
                self._handle_body_token(self._body, token, logprobs[index] if index < len(logprobs) else None)
        return self._delta_buffer.take_deltas()

    def finish(self, reason: Literal["stop", "length"], *, input_tokens: int, cached_tokens: int) -> list[Delta]:
        """Return the buffered deltas and the Finish; nothing at a second call.

        The reason is `tool_calls` if there was a call, and `length` if a call was cut off.
        """
        if self._is_finished:
            return []
        self._is_finished = True
        self._interrupt(at_end=True, reason=reason)
        if self.repair_count:
            HARMONY_REPAIRS.add(self.repair_count)
            _log.debug("an answer in Harmony needed %d corrections", self.repair_count)
        usage = Usage(input_tokens, self.output_tokens, cached_tokens, self.reasoning_tokens)
        reason_: FinishReason = (
            "length" if self._was_cut_off else "tool_calls" if self._has_call and reason == "stop" else reason
        )
        return [*self._delta_buffer.take_deltas(), Finish(reason_, usage, self._stop_string)]

    def _handle_control_token(self, token: int) -> None:
        self._message_ids.append(token)
        if token == START:
            self._interrupt()
            self._message_ids, self._is_well_formed = [START], True
            self._header_ids, self._has_role = [], True
        elif token == MESSAGE and self._body is None:
            self._open_body(self._read_header())
        elif token in (END, CALL, RETURN):
            self._recover_header(is_ended=True)
            self._close_body(token)
        elif token in (CHANNEL, CONSTRAIN) and self._header_ids is not None and not self._ends_text(token):
            self._count_repair(token in self._header_ids)
            self._header_ids.append(token)
        elif token == CHANNEL:
            self._interrupt()
            self._begin_header(token)
        else:
            self._count_repair()

    def _ends_text(self, token: int) -> bool:
        """Return true if the header is text without `<|message|>`, which another message follows."""
        if token != CHANNEL or CHANNEL not in (self._header_ids or ()):
            return False
        header = self._read_open_header(is_ended=True)
        return header.recipient is None and bool(header.text.strip())

    def _interrupt(self, *, at_end: bool = False, reason: Literal["stop", "length"] = "stop") -> None:
        """End a message that is incomplete because another one begins, or the output ends."""
        self._count_repair(not at_end and (bool(self._header_ids) or self._body is not None))
        self._recover_header(is_ended=False)
        self._close_body(None, is_stopped=reason == "stop")

    def _begin_header(self, token: int) -> None:
        """Begin a header without `<|start|>`."""
        self._message_ids = [*self._assistant_start, token]
        self._header_ids, self._has_role = [token], False
        self._count_repair()

    def _handle_header_token(self, token: int) -> None:
        if self._header_ids is None:
            self._begin_header(token)
            return
        self._message_ids.append(token)
        self._header_ids.append(token)
        if len(self._header_ids) > MAX_HEADER_TOKENS or (
            CHANNEL not in self._header_ids and self._is_text(self._header_ids)
        ):
            self._recover_header(is_ended=True)

    def _is_text(self, header: list[int]) -> bool:
        text = b"".join(map(self._vocabulary.decode_bytes, header))
        return len(text) > MAX_UNMARKED_BYTES[self._has_role] and b"to=" not in text

    def _read_header(self) -> HarmonyHeader:
        header = ids_to_header(self._vocabulary, self._header_ids or [], has_role=self._has_role)
        self._header_ids = None
        return header

    def _read_open_header(self, *, is_ended: bool) -> HarmonyHeader:
        return ids_to_open_header(self._vocabulary, self._header_ids or [], has_role=self._has_role, is_ended=is_ended)

    def _recover_header(self, *, is_ended: bool) -> None:
        """Handle a header without `<|message|>`: its text, or its call. Of a truncated one without a channel, a single
        word may be the beginning of a role or a recipient."""
        if not self._header_ids:
            self._header_ids = None
            return
        header = self._read_open_header(is_ended=is_ended)
        self._header_ids = None
        self._count_repair(is_ended)
        is_whole_word = is_ended or header.channel is not None or header.recipient is not None
        is_text = bool(header.text.strip()) and (is_whole_word or len(header.text.split()) > 1)
        if is_text or (header.recipient is not None and is_ended):
            self._open_body(header)
            if self._body is not None and header.text:
                self._body.feed(header.text, self._delta_buffer)
                self._check_stop(self._body)

    def _open_body(self, header: HarmonyHeader) -> None:
        self._count_repair(header.is_malformed)
        if not header.is_assistant:
            self._body = IgnoredBody()
        elif self._means_several_calls(header.recipient) or (header.recipient is None and header.names_unknown_channel):
            self._body = DeferredBody(header.recipient)
        elif header.recipient is None:
            self._body = TextBody(header.channel or "final", self._stop_strings)
        else:
            self._body = self._begin_call(header.recipient, header.content_type)

    def _means_several_calls(self, recipient: str | None) -> bool:
        return recipient in PARALLEL_RECIPIENTS and recipient_to_callee(recipient, self._tools).tool is None

    def _begin_call(self, recipient: str, content_type: str | None) -> CallBody:
        callee = recipient_to_callee(recipient, self._tools)
        self._count_repair(callee.is_malformed)
        return CallBody(self._make_call_id(), callee, content_type, self._delta_buffer)

    def _handle_body_token(self, body: MessageBody, token: int, logprob: TokenLogprob | None) -> None:
        self._message_ids.append(token)
        self.reasoning_tokens += isinstance(body, TextBody) and body.channel == "analysis"
        body.feed(self._vocabulary.decode_bytes(token), self._delta_buffer, logprob)
        self._check_stop(body)

    def _check_stop(self, body: MessageBody) -> None:
        if body.is_stopped:
            self.is_stopped = True
            self._stop_string = body.stop_string if isinstance(body, TextBody) else None
            self._body = None

    def _close_body(self, end_token: int | None, *, is_stopped: bool = True) -> None:
        """End the body, by its token or without one. A call is whole if its own token ends it, or its arguments are.
        The end of the output ends no call unless the model `is_stopped`."""
        body, self._body = self._body, None
        if isinstance(body, DeferredBody):
            self._close_deferred_body(body, end_token, is_stopped=is_stopped)
            return
        if body is None:
            return
        body.finish(self._delta_buffer)
        if isinstance(body, CallBody):
            whole = end_token == CALL or (is_stopped and body.is_whole(is_ended=end_token is not None))
            if whole:
                body.complete(self._delta_buffer)
            self._has_call = self._has_call or whole
            self._was_cut_off = self.is_stopped = self._was_cut_off or not whole
            self._count_repair(end_token != CALL)
        key = body.message_key()
        ends_well = end_token == body.end_token or (
            end_token == RETURN and isinstance(body, TextBody) and body.channel == "final"
        )
        if self._token_cache is not None and key is not None and self._is_well_formed and ends_well:
            self._token_cache.put(key, [*self._message_ids[:-1], body.end_token])

    def _close_deferred_body(self, body: DeferredBody, end_token: int | None, *, is_stopped: bool) -> None:
        """End each body that it stands for. Text is the answer only where its end is that of the answer; what is no
        list of calls is a call of a tool that there is not."""
        self._count_repair()
        if body.recipient is None:
            text = TextBody("final" if end_token == RETURN else "analysis", self._stop_strings)
            self._body = text
            self.reasoning_tokens += len(body.pieces) if text.channel == "analysis" else 0
            for data, logprob in body.pieces:
                text.feed(data, self._delta_buffer, logprob)
                self._check_stop(text)
                if text.is_stopped:
                    break
            self._close_body(end_token, is_stopped=is_stopped)
            return
        whole = b"".join(data for data, _ in body.pieces)
        for recipient, arguments in body.read_calls() or [(body.recipient, whole)]:
            self._body = call = self._begin_call(recipient, "json")
            call.feed(arguments, self._delta_buffer)
            self._close_body(end_token, is_stopped=is_stopped)

    def _count_repair(self, is_needed: bool = True) -> None:  # noqa: FBT001 - a condition, not a mode
        self.repair_count += is_needed
        self._is_well_formed = self._is_well_formed and not is_needed
