"""The measure of a chat in tokens, where no engine has counted them."""

from typing import Final

from apis.chat import ChatRequest, Message, RefusalPart, TextPart

_BYTES_PER_TOKEN: Final = 4
"""Bytes of UTF-8 for each token, before any usage of a model is known: about right for English and for code."""
_TOKENS_PER_MESSAGE: Final = 4
_TOKENS_PER_FILE: Final = 1000
"""Tokens of a picture or a file, whose bytes say little about them."""


def measure_chat(chat: ChatRequest) -> int:
    """Return about how many tokens the chat's messages and tools have, by their bytes; at least 1."""
    size_bytes = sum(len(tool.model_dump_json(exclude_none=True)) for tool in chat.tools or ())
    tokens = _TOKENS_PER_MESSAGE * len(chat.messages)
    for message in chat.messages:
        content = message.content
        if isinstance(content, str) and not (message.tool_calls or message.reasoning or message.refusal):
            size_bytes += len(content) if content.isascii() else _size_bytes(content)  # nearly every message
            continue
        text_bytes, file_count = _measure_message(message)
        size_bytes += text_bytes
        tokens += _TOKENS_PER_FILE * file_count
    return max(1, tokens + size_bytes // _BYTES_PER_TOKEN)


def _measure_message(message: Message) -> tuple[int, int]:
    """Return the bytes of the message's texts and the number of its pictures and files."""
    content = message.content
    texts, file_count = [message.reasoning, message.refusal], 0
    if isinstance(content, str):
        texts.append(content)
    else:
        for part in content or ():
            match part:
                case TextPart(text=text) | RefusalPart(refusal=text):
                    texts.append(text)
                case _:
                    file_count += 1
    for call in message.tool_calls or ():
        texts += (
            (call.function.name, call.function.arguments)
            if call.type == "function"
            else (call.custom.name, call.custom.input)
        )
    return sum(_size_bytes(text) for text in texts if text), file_count


def _size_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
