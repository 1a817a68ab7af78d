"""Exit codes: a failure that the user can repair ends a command with one message on stderr and a code."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from apis.errors import ConfigError, StackError

CONFIG_ERROR: Final = 78
"""The run config or the environment has to be changed first (EX_CONFIG of sysexits.h)."""
CANNOT_START: Final = 1
"""A service that the stack needs is unavailable; a later start may succeed."""


@contextmanager
def exit_on_error(config_error_code: int = CONFIG_ERROR) -> Generator[None]:
    """Turn a ConfigError or a StackError into its message on stderr and a SystemExit, in the command and in workers."""
    try:
        yield
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        raise SystemExit(config_error_code) from exc
    except StackError as exc:
        # The notes name, from the inside out, what the server said, its URL, and the provider's file and path in it.
        sys.stderr.write(": ".join([*reversed(getattr(exc, "__notes__", [])), exc.message]) + "\n")
        raise SystemExit(CANNOT_START) from exc
