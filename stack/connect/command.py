"""`stack connect`: print a client's settings, write them to files of their own, or undo that."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from stack.connect.clients import SETUPS, Setup
from stack.connect.written_files import WrittenFiles
from stack.server_models import read_server

Action = Literal["print", "write", "restore"]


def connect(client: str, url: str, key_variable: str | None, model: str | None, action: Action) -> Iterator[str]:
    """Do the action for a client and yield lines about it. `key_variable` is the environment variable of the API key.

    Raises ConfigError for files and names that the user has to change, and UpstreamError where the server does not
    answer or refuses the key.
    """
    written = WrittenFiles(client)
    if action == "restore":
        yield from written.restore()
        return
    setup = SETUPS[client](read_server(url, key_variable, model))
    if action == "write":
        yield from written.write({file.path: file.text for file in setup.files})
        yield f"Start it: {setup.start}"
        if setup.note is not None:
            yield f"{setup.note}."
        yield f"Undo it: stack connect {client} --restore"
    else:
        yield from _print_lines(client, setup)


def _print_lines(client: str, setup: Setup) -> Iterator[str]:
    for file in setup.files:
        if file.command is None:
            yield f"# {_shorten(file.path)}"
            yield file.text
        else:
            yield f"# {_shorten(file.path)} is written by this command:"
            yield f"{file.command}\n"
    yield f"# Start it: {setup.start}"
    if setup.note is not None:
        yield f"# {setup.note}."
    yield f"# `stack connect {client} --write` writes this, and `--restore` undoes it."


def _shorten(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
