"""Exceptions that have ended work, without what that work held."""

from typing import TypeVar

ExceptionT = TypeVar("ExceptionT", bound=BaseException)


def without_traceback(exc: ExceptionT) -> ExceptionT:
    """Return the exception without its traceback and those of the exceptions that caused it.

    A traceback holds the frames that the exception has passed, and something in them often holds the exception: a
    stream its failure, a variable the error. Such a cycle keeps all that the work had in hand until the next full
    collection of garbage, which counts objects and not their bytes: five times the text of a failed answer.
    """
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [exc]
    while pending:
        current = pending.pop()
        if current is not None and current not in chain:
            chain.append(current)
            current.__traceback__ = None
            pending += [current.__cause__, current.__context__]
    return exc
