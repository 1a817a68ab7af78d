"""The lessons of the tests' tiny gpt-oss: a few conversations in Harmony's words, and the texts to ask it by."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from openai_harmony import (  # pyright: ignore[reportMissingTypeStubs] - typed in its source, without the marker file
    Author,
    Conversation,
    DeveloperContent,
    HarmonyEncoding,
    Message,
    Role,
    SystemContent,
    ToolDescription,
    ToolNamespaceConfig,
)

from providers.responses.tools.file_search import FILE_SEARCH_FUNCTION

TODAY: Final = "2026-01-01"
"""The date in its system message: ask it with `current_date` set to this day."""

FRANCE: Final = "What is the capital of France?"
FRANCE_THOUGHT: Final = "The user asks for the capital of France."
FRANCE_ANSWER: Final = "The capital of France is Paris."

WEATHER: Final[dict[str, Any]] = {
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ROME: Final = "What is the weather in Rome?"
ROME_THOUGHT: Final = "I need to look up the weather in Rome."
ROME_CALL: Final = '{"city":"Rome"}'
ROME_RESULT: Final = "17 degrees and sunny"
ROME_RESULT_THOUGHT: Final = "The tool says 17 degrees and sunny."
ROME_ANSWER: Final = "In Rome it is 17 degrees and sunny."
THANKS: Final = "Thank you."
THANKS_THOUGHT: Final = "The user is content."
THANKS_ANSWER: Final = "You are welcome."

OSLO: Final = "Say what you do, then look up the weather in Oslo."
OSLO_THOUGHT: Final = "First a word to the user, then the call."
OSLO_PREAMBLE: Final = "I will look up the weather in Oslo."
OSLO_CALL: Final = '{"city":"Oslo"}'
OSLO_RESULT: Final = "3 degrees and snow"
OSLO_RESULT_THOUGHT: Final = "The tool says 3 degrees and snow."
OSLO_ANSWER: Final = "In Oslo it is 3 degrees and snow."

HELLO: Final = "Hello."
HELLO_THOUGHT: Final = "The user greets me."
HELLO_ANSWER: Final = "Hello! How can I help?"
HELLO_CALL: Final = '{"city":"Paris"}'
"""The arguments of its call when a call is required, though it would rather answer."""

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
INVENT: Final = "Invent a person."
INVENT_THOUGHT: Final = "The answer must be JSON."
INVENT_ANSWER: Final = '{"name":"Ada","age":36}'


@dataclass(frozen=True)
class Use:
    """A use of a tool: the model's thought before, the called tool, the input of the call, and its result."""

    thought: str
    to: str
    call: str
    result: str

    @property
    def native(self) -> bool:
        """True for tools that gpt-oss was trained on, which it uses as a part of its analysis."""
        return self.to == "python" or self.to.startswith("browser.")


@dataclass(frozen=True)
class ToolTurn:
    """A question that is answered with tools. `answer_in_history` is the answer as later turns see it,
    where that differs."""

    question: str
    uses: Sequence[Use]
    result_thought: str
    answer: str
    answer_in_history: str = ""


PAGE_URL: Final = "http://cities.example:8642/bergen"
PAGE: Final = "<title>Bergen in figures</title><p>Bergen lies by the sea.</p><p>290,000 people live there.</p>"
FOUND: Final = {"url": PAGE_URL, "title": "Bergen in figures", "highlights": ["Bergen is a city in Norway."]}
CITED: Final = f"([Bergen in figures]({PAGE_URL}))"
_SHOWN: Final = (
    f"Bergen in figures ({PAGE_URL})\n**viewing lines [0 - 2] of 2**\n\n"
    "L0: Bergen lies by the sea.\nL1: \nL2: 290,000 people live there."
)
WEB: Final = (
    ToolTurn(
        "How many people live in Bergen? Search the web.",
        [
            Use(
                "I search the web for Bergen.",
                "browser.search",
                '{"query":"people in Bergen"}',
                "[0] people in Bergen\n**viewing lines [0 - 3] of 3**\n\nL0: # Search Results\nL1: \n"
                "L2:   * 【0†Bergen in figures†cities.example】\nL3: Bergen is a city in Norway.",
            ),
            Use("The first result may say it.", "browser.open", '{"id":0}', f"[1] {_SHOWN}"),
        ],
        "The page says 290,000 people.",
        "In Bergen live 290,000 people【1†L2】, in Norway【0†L3】.",
        f"In Bergen live 290,000 people{CITED}, in Norway{CITED}.",
    ),
    ToolTurn(
        "And where does it lie?",
        [Use("I look at the page again.", "browser.open", '{"cursor":1}', f"[2] {_SHOWN}")],
        "The page says by the sea.",
        "It lies by the sea【2†L0】.",
        f"It lies by the sea{CITED}.",
    ),
)
SUM: Final = (
    ToolTurn(
        "Add 1234 and 5678 in Python.",
        [Use("I let Python add them.", "python", "total = 1234 + 5678\nprint(total)\n", "6912")],
        "Python says 6912.",
        "The sum is 6912.",
    ),
    ToolTurn(
        "Now double it.",
        [Use("Python still knows the total.", "python", "print(2 * total)\n", "13824")],
        "Python says 13824.",
        "Twice the sum is 13824.",
    ),
)
PEOPLE: Final = {"Bergen": "290000", "Oslo": "700000"}
ATLAS: Final[dict[str, Any]] = {
    "name": "population",
    "description": "How many people live in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"title": "City", "type": "string"}},
        "required": ["city"],
    },
}
"""A tool of an MCP server with the label `atlas`."""
POPULATION: Final = (
    ToolTurn(
        "How many people does the atlas give for Bergen?",
        [Use("I ask the atlas for Bergen.", "atlas.population", '{"city":"Bergen"}', PEOPLE["Bergen"])],
        "The atlas says 290000.",
        "The atlas gives 290000 people.",
    ),
    ToolTurn(
        "And for Oslo?",
        [Use("I ask the atlas for Oslo.", "atlas.population", '{"city":"Oslo"}', PEOPLE["Oslo"])],
        "The atlas says 700000.",
        "For Oslo it gives 700000 people.",
    ),
)

LIBRARY: Final = {"whales.md": "The blue whale is the largest animal that has ever lived. It eats krill."}
FILES: Final = (
    ToolTurn(
        "Which animal is the largest? Look into my files.",
        [
            Use(
                "I search the files.",
                "functions.file_search",
                '{"queries":["largest animal"]}',
                f"[1] whales.md\n{LIBRARY['whales.md']}",
            )
        ],
        "The file says the blue whale.",
        "The largest is the blue whale【1】.",
        "The largest is the blue whale.",
    ),
)

TURNS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def turn_question(number: str) -> str:
    """Return the user's text at a turn of the long chain."""
    return f"Give me number {number}."


def turn_thought(number: str) -> str:
    """Return the model's thought at that turn."""
    return f"The user wants number {number}."


def turn_answer(number: str) -> str:
    """Return the model's answer at that turn."""
    return f"Here is number {number}."


@dataclass(frozen=True)
class Lesson:
    """After `prompt`, which ends in `<|start|>assistant`, say `answer`, but for the parts of it that are `heard`: they
    are what tools say. A light one is outweighed by another lesson for the same prompt, and only taken where that is
    forbidden."""

    prompt: Sequence[int]
    answer: Sequence[int]
    weight: float = 1.0
    heard: Sequence[slice] = ()


def lessons(encoding: HarmonyEncoding) -> Iterator[Lesson]:
    """All there is to learn."""

    def encoded(text: str) -> list[int]:
        return encoding.encode(text, allowed_special="all")

    def lesson(messages: Sequence[Message], answer: str, *, tail: str = "", weight: float = 1.0) -> Lesson:
        prompt = encoding.render_conversation_for_completion(Conversation.from_messages(messages), Role.ASSISTANT)
        return Lesson([*prompt, *encoded(tail)], encoded(answer), weight)

    system = Message.from_role_and_content(Role.SYSTEM, SystemContent.new().with_conversation_start_date(TODAY))
    yield lesson([system, _said(FRANCE)], _final(FRANCE_THOUGHT, FRANCE_ANSWER))
    yield lesson([system, PERSON_FORMAT, _said(INVENT)], _final(INVENT_THOUGHT, INVENT_ANSWER))

    tools = DeveloperContent.new().with_function_tools([ToolDescription(**WEATHER)])
    able = [system, Message.from_role_and_content(Role.DEVELOPER, tools)]
    yield lesson([*able, _said(HELLO)], _final(HELLO_THOUGHT, HELLO_ANSWER))
    forced = f"<|channel|>analysis<|message|>{HELLO_THOUGHT}<|end|><|start|>assistant{_call(HELLO_CALL)}"
    yield lesson([*able, _said(HELLO)], forced, weight=0.5)
    yield from _weather(lesson, [*able, _said(ROME)], ROME_STORY)
    yield from _weather(lesson, [*able, _said(OSLO)], OSLO_STORY)

    messages = [system]
    for number in TURNS:
        messages.append(_said(turn_question(number)))
        yield lesson(messages, _final(turn_thought(number), turn_answer(number)))
        messages.append(_spoke("final", turn_answer(number)))

    for opening, turns in _tool_conversations():
        yield from _tool_lessons(encoding, opening, turns)


def _tool_conversations() -> Iterator[tuple[list[Message], Sequence[ToolTurn]]]:
    """Conversations in which tools are used, with the messages that offer them."""

    def system() -> SystemContent:
        return SystemContent.new().with_conversation_start_date(TODAY)

    yield [Message.from_role_and_content(Role.SYSTEM, system().with_browser_tool())], WEB
    yield [Message.from_role_and_content(Role.SYSTEM, system().with_python_tool())], SUM
    atlas = ToolNamespaceConfig(name="atlas", tools=[ToolDescription(**ATLAS)])
    offered = Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_tools(atlas))
    yield [Message.from_role_and_content(Role.SYSTEM, system()), offered], POPULATION
    search = FILE_SEARCH_FUNCTION.function
    tool = ToolDescription(
        name=search.name, description=search.description or "", parameters=dict(search.parameters or {})
    )
    searches = DeveloperContent.new().with_function_tools([tool])
    able = Message.from_role_and_content(Role.DEVELOPER, searches)
    yield [Message.from_role_and_content(Role.SYSTEM, system()), able], FILES


def _tool_lessons(encoding: HarmonyEncoding, opening: list[Message], turns: Sequence[ToolTurn]) -> Iterator[Lesson]:
    """A lesson for each turn: all that is said in it, by the model and by its tools."""

    def encoded(text: str) -> list[int]:
        return encoding.encode(text, allowed_special="all")

    before = encoding.render_conversation(Conversation.from_messages(opening))
    for turn in turns:
        before += encoded(f"<|start|>user<|message|>{turn.question}<|end|>")
        answer: list[int] = []
        heard: list[slice] = []
        for use in turn.uses:
            answer += encoded(f"<|channel|>analysis<|message|>{use.thought}<|end|><|start|>assistant{_use(use)}")
            result = encoded(f"{_render_result(use)}<|start|>assistant")
            heard.append(slice(len(answer), len(answer) + len(result)))
            answer += result
        answer += encoded(_final(turn.result_thought, turn.answer))
        yield Lesson([*before, *encoded("<|start|>assistant")], answer, heard=heard)
        # calls of native tools leave the history once the question is answered
        prefix = "".join(f"<|start|>assistant{_use(use)}{_render_result(use)}" for use in turn.uses if not use.native)
        said = f"<|start|>assistant<|channel|>final<|message|>{turn.answer_in_history or turn.answer}<|end|>"
        before += encoded(prefix + said)


def _use(use: Use) -> str:
    if use.native:
        return f"<|channel|>analysis to={use.to} code<|message|>{use.call}<|call|>"
    return f"<|channel|>commentary to={use.to} <|constrain|>json<|message|>{use.call}<|call|>"


def _render_result(use: Use) -> str:
    channel = "analysis" if use.native else "commentary"
    return f"<|start|>{use.to} to=assistant<|channel|>{channel}<|message|>{use.result}<|end|>"


@dataclass(frozen=True)
class _Story:
    """A call with what came before it and after it."""

    thought: str
    preamble: str
    call: str
    result: str
    result_thought: str
    answer: str


ROME_STORY: Final = _Story(ROME_THOUGHT, "", ROME_CALL, ROME_RESULT, ROME_RESULT_THOUGHT, ROME_ANSWER)
OSLO_STORY: Final = _Story(OSLO_THOUGHT, OSLO_PREAMBLE, OSLO_CALL, OSLO_RESULT, OSLO_RESULT_THOUGHT, OSLO_ANSWER)


def _weather(lesson: Any, messages: list[Message], story: _Story) -> Iterator[Lesson]:
    """The call, its result, and thanks: after a call as the model wrote it, and as the library writes it."""
    said = f"<|channel|>commentary<|message|>{story.preamble}<|end|><|start|>assistant" if story.preamble else ""
    written = f"<|channel|>analysis<|message|>{story.thought}<|end|><|start|>assistant{said}{_call(story.call)}"
    result = f"<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{story.result}<|end|>"
    answer, welcome = _final(story.result_thought, story.answer), _final(THANKS_THOUGHT, THANKS_ANSWER)
    yield lesson(messages, written)
    yield lesson(messages, answer, tail=f"{written}{result}<|start|>assistant")
    call = _spoke("commentary", story.call).with_recipient("functions.get_weather")
    tool_message = Message.from_author_and_content(Author.new(Role.TOOL, "functions.get_weather"), story.result)
    done = [
        *([_spoke("commentary", story.preamble)] if story.preamble else []),
        call.with_content_type("<|constrain|>json"),
        tool_message.with_channel("commentary").with_recipient("assistant"),
    ]
    yield lesson([*messages, _spoke("analysis", story.thought), *done], answer)
    yield lesson([*messages, *done, _spoke("final", story.answer), _said(THANKS)], welcome)
    plain = f"<|start|>assistant{said}{_call(story.call)}{result}<|start|>assistant<|channel|>final<|message|>"
    thanks = f"{plain}{story.answer}<|end|><|start|>user<|message|>{THANKS}<|end|><|start|>assistant"
    yield lesson(messages, welcome, tail=thanks.removeprefix("<|start|>assistant"))


def _said(text: str) -> Message:
    return Message.from_role_and_content(Role.USER, text)


def _spoke(channel: str, text: str) -> Message:
    return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)


def _call(arguments: str) -> str:
    return f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{arguments}<|call|>"


def _final(thought: str, answer: str) -> str:
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
    )


PERSON_FORMAT: Final = Message.from_role_and_content(
    Role.DEVELOPER, f"# Response Formats\n\n## person\n\n{json.dumps(PERSON, separators=(',', ':'))}"
)
