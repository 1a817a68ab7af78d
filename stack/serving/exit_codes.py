"""How a command fails: one message on stderr and an exit code, for what the user can put right."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from apis.errors import ConfigError, StackError

CONFIG_ERROR: Final = 78
"""The run config or the environment has to be changed first (EX_CONFIG of sysexits.h)."""
CANNOT_START: Final = 1
"""Something that the stack needs is not there; later it may be."""


@contextmanager
def exit_on_error(config_error_code: int = CONFIG_ERROR) -> Generator[None]:
    """Turns a ConfigError or a StackError into its message on stderr and a SystemExit, here and in workers alike."""
    try:
        yield
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        raise SystemExit(config_error_code) from exc
    except StackError as exc:
        # The notes say where in which file the provider stands that raised it.
        sys.stderr.write(": ".join([*getattr(exc, "__notes__", []), exc.message]) + "\n")
        raise SystemExit(CANNOT_START) from exc
