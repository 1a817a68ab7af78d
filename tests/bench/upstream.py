"""A chat-completions server that answers at once, or one token every so often, from prepared bytes.

    python tests/bench/upstream.py PORT

The prompt's last `n=TOKENS d=MICROSECONDS` says what to answer; with ` call` after it, the answer ends with a call of
the function `look_up`. Its own cost is small compared with what is measured.
`GET /counts` returns the number of answers it has sent and their tokens, and `GET /v1/models` its model.
"""

import asyncio
import json
import re
import sys
import time
from dataclasses import asdict, dataclass

DIRECTIVE = re.compile(rb"n=(\d+) d=(\d+)( call)?(?!.*n=\d+ d=\d+)", re.DOTALL)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(choices: str, usage: str = "null") -> bytes:
    head = 'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"fake-model",'
    data = f'{head}"choices":{choices},"usage":{usage}}}\n\n'.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def _token(position: int) -> bytes:
    return _chunk(f'[{{"index":0,"delta":{{"content":" w{position % 10000:04d}"}},"finish_reason":null}}]')


TOKENS = [_token(position) for position in range(1024)]
FIRST = _chunk('[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]')
CALL = _chunk(
    '[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"look_up",'
    '"arguments":"{}"}}]},"finish_reason":"tool_calls"}]'
)
STOP = _chunk('[{"index":0,"delta":{},"finish_reason":"stop"}]')
PROMPT_TOKENS = 10
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _end(tokens: int, *, calls: bool) -> bytes:
    total = PROMPT_TOKENS + tokens
    usage = f'{{"prompt_tokens":{PROMPT_TOKENS},"completion_tokens":{tokens},"total_tokens":{total}}}'
    return (CALL if calls else STOP) + _chunk("[]", usage) + DONE


@dataclass
class _Counts:
    answers: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, tokens: int) -> None:
        self.answers += 1
        self.input_tokens += PROMPT_TOKENS
        self.output_tokens += tokens

    def encode(self) -> bytes:
        return _encode_answer(asdict(self))


def _encode_answer(value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


MODELS = {"object": "list", "data": [{"id": "fake-model", "object": "model", "created": 1, "owned_by": "bench"}]}
counts = _Counts()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith((b"GET /counts ", b"GET /v1/models ")):
                writer.write(counts.encode() if b"/counts" in head else _encode_answer(MODELS))
                continue
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            directive = DIRECTIVE.search(body)
            tokens, pause_us = (int(directive[1]), int(directive[2])) if directive else (1, 0)
            end = _end(tokens, calls=directive is not None and directive[3] is not None)
            if pause_us:
                began = time.monotonic()
                writer.write(HEAD + FIRST)
                for number, token in enumerate(TOKENS[:tokens], 1):  # by the clock, or streams would drift together
                    await asyncio.sleep(began + number * pause_us / 1e6 - time.monotonic())
                    writer.write(token)
                writer.write(end)
            else:
                writer.write(HEAD + FIRST + b"".join(TOKENS[:tokens]) + end)
            if head.startswith(b"POST "):
                counts.add(tokens)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main(port: int) -> None:
    async with await asyncio.start_server(_serve, "127.0.0.1", port, limit=1 << 24, backlog=4096) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
