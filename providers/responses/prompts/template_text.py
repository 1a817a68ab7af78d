"""TemplateText: text with variables, written `{{name}}`, parsed once when its template is loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from apis.wire.item_parts import InputFile, InputImage, InputText

_PLACEHOLDER: Final = re.compile(r"\\\{\{|\{\{([^{}\n]*)\}\}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")

ContentPart = InputText | InputImage | InputFile


@dataclass(frozen=True, slots=True)
class Variable:
    """A place of a text that a value of the request replaces."""

    name: str


@dataclass(frozen=True, slots=True)
class TemplateText:
    """A text as literal pieces and variables, in order."""

    pieces: tuple[str | Variable, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of the variables."""
        return frozenset(piece.name for piece in self.pieces if isinstance(piece, Variable))

    def render_parts(self, values: Mapping[str, str | ContentPart]) -> list[tuple[ContentPart, str | None]]:
        """Return the content parts of the text, each image and file with the name of its variable, else None.
        Neighbouring texts are joined; a value is inserted as it is, and braces in it mean nothing."""
        parts: list[tuple[ContentPart, str | None]] = []
        texts: list[str] = []
        for piece in self.pieces:
            value = piece if isinstance(piece, str) else values[piece.name]
            if isinstance(value, str | InputText):
                texts.append(value if isinstance(value, str) else value.text)
                continue
            assert isinstance(piece, Variable)  # literal pieces are texts
            if text := "".join(texts):
                parts.append((InputText(type="input_text", text=text), None))
            texts.clear()
            parts.append((value, piece.name))
        if (text := "".join(texts)) or not parts:
            parts.append((InputText(type="input_text", text=text), None))
        return parts


def parse_template_text(text: str) -> TemplateText:
    """Return the pieces of a text. Two braces that are no variable are written `\\{{`. Raises ValueError for a pair of
    double braces without a name in it."""
    pieces: list[str | Variable] = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        pieces.append(text[end : match.start()])
        end = match.end()
        if match[1] is None:
            pieces.append("{{")
            continue
        name = match[1].strip()
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"'{match[0][:80]}' is no variable: write {{{{name}}}} with letters, digits, '_', '-' and '.', "
                "or \\{{ for two braces."
            )
        pieces.append(Variable(name))
    pieces.append(text[end:])
    return TemplateText(tuple(piece for piece in pieces if piece))
