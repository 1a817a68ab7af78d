"""Hosts of one url, which are tried at the same time, so that one that hangs keeps the store from no other."""

import asyncio
from collections.abc import Collection
from typing import TypeVar

ResultT = TypeVar("ResultT")


def split_hosts(url: str) -> list[str]:
    """Return a url for each host of a url that names several (`@a:5432,b:5432/`)."""
    hosts = _split(url)[1]
    return [replace_hosts(url, host) for host in hosts.split(",")]


def replace_hosts(url: str, host: str) -> str:
    """Return the url with that host and port in place of its own."""
    before, _, after = _split(url)
    return f"{before}{host}{after}"


def _split(url: str) -> tuple[str, str, str]:
    """Return the parts of a url before its hosts, its hosts, and the part after them."""
    scheme, separator, rest = url.partition("://")
    end = min((place for mark in "/?" if (place := rest.find(mark)) >= 0), default=len(rest))
    user, at, hosts = rest[:end].rpartition("@")
    return f"{scheme}{separator}{user}{at}", hosts, rest[end:]


async def first_success(
    attempts: "Collection[asyncio.Task[ResultT]]", *, fatal: tuple[type[Exception], ...] = ()
) -> "asyncio.Task[ResultT]":
    """Return the first attempt that succeeds. Where all fail, raise the error of one of them: one of `fatal`, if there
    is any. The other attempts go on."""
    pending, errors = set(attempts), list[BaseException]()
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for attempt in done:
            error = attempt.exception()
            if error is None:
                return attempt
            errors.append(error)
    raise next((error for error in errors if isinstance(error, fatal)), errors[0])
