"""Functions for the provider `next_token`: each says which token comes next by the last thing that was said."""

import threading
from collections.abc import Mapping
from typing import Final

from providers.inference.harmony.vocabulary import CALL, END, MESSAGE, START, load_vocabulary

WORD: Final = 3575
"""A token of an endless thought."""
SCRIPTS: Final[Mapping[str, str]] = {
    "hi": "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Hello there!<|return|>",
    "weather": "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>',
    "sunny": "<|channel|>final<|message|>It is sunny.<|return|>",
    "twice": "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I look again.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>',
    "bare": "<|channel|>final Hello there!<|return|>",
    "both": "<|channel|>final<|message|>Yes.<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>",
    "endless": "<|channel|>analysis<|message|>",
}

calls: Final[list[tuple[int, float, bool]]] = []
"""Calls of `recorded`: how many tokens, the temperature and whether a new prompt began."""
prompts: Final[list[list[int]]] = []
"""Prompts of `remembers`."""
stuck = threading.Event()
"""Set when `sticks` is called; it returns once `released` is."""
released = threading.Event()


def plain(tokens: list[int], temperature: float) -> int:
    """Plays the script for the last message that is not the assistant's."""
    encoding = load_vocabulary().encoding
    assistant = encoding.encode("assistant")[0]
    last = max(at for at, token in enumerate(tokens[:-1]) if token == START and tokens[at + 1] != assistant)
    ends = tokens.index(END, last)
    said = encoding.decode(tokens[tokens.index(MESSAGE, last) + 1 : ends])
    script = encoding.encode(SCRIPTS[said], allowed_special="all")
    # what is made begins right after the `<|start|>assistant` that follows the message
    position = len(tokens) - (ends + 3)
    return script[position] if position < len(script) else WORD


def recorded(tokens: list[int], temperature: float, new_request: bool) -> int:
    """Act like `plain`, and record the arguments."""
    calls.append((len(tokens), temperature, new_request))
    return plain(tokens, temperature)


def named(tokens: list[int], temperature: float, *, new_request: bool = False) -> int:
    """Act like `recorded`, with the third argument by name."""
    return recorded(tokens, temperature, new_request)


def remembers(tokens: list[int], temperature: float, new_request: bool) -> int:
    """Act like `plain`, and record the prompts."""
    if new_request:
        prompts.append([*tokens])
    return plain(tokens, temperature)


def searches(tokens: list[int], temperature: float) -> int:
    """Make one and the same search after every message."""
    written = '<|channel|>commentary to=functions.web_search <|constrain|>json<|message|>{"query":"rome"}<|call|>'
    begun = max(at for at, token in enumerate(tokens) if token == START)
    return load_vocabulary().encoding.encode(written, allowed_special="all")[len(tokens) - (begun + 2)]


def fails_to_call(tokens: list[int], temperature: float) -> int:
    """Raises at the end of a call, with a text that must reach no client."""
    token = plain(tokens, temperature)
    if token == CALL:
        raise ValueError("secret")
    return token


def sticks(tokens: list[int], temperature: float) -> int:
    """Hangs until it is released."""
    stuck.set()
    released.wait(30)
    return plain(tokens, temperature)


def text(tokens: list[int], temperature: float) -> str:
    """No number."""
    return "5"


def beyond(tokens: list[int], temperature: float) -> int:
    """No id of the vocabulary."""
    return 201_088


def truth(tokens: list[int], temperature: float) -> bool:
    """Return a value that is no token, although Python counts it as a number."""
    return True


async def waits(tokens: list[int], temperature: float) -> int:
    """Not to be called in a thread."""
    return 1


def narrow(tokens: list[int]) -> int:
    """Takes too little."""
    return 1
