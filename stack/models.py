"""The command `stack models`: the models that a run config may name, as a table or as JSON, fetched and removed."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict

from providers.inference.model_files.library import GgufLibrary, LibraryListing, LibraryModel


def list_models(*, as_json: bool) -> Iterator[str]:
    """Yield the lines of the listing. Raises ConfigError."""
    listing = asyncio.run(GgufLibrary().list_models())
    if as_json:
        yield json.dumps(asdict(listing), indent=2)
        return
    yield f"This machine: {listing.machine}."
    yield f"Models may take {_gigabytes(listing.memory_bytes)} of memory together."
    yield ""
    yield from _table_lines(listing)
    yield ""
    used = sum(model.disk_bytes for model in listing.models)
    yield f"On disk: {_gigabytes(used)} in {' and '.join(listing.folders)}; {_gigabytes(listing.disk_free_bytes)} free."
    yield "Serve one: stack run local --model NAME"


def pull(name: str, *, as_json: bool) -> str:
    """Fetch the model and return a line about it. Raises ConfigError."""
    path = asyncio.run(GgufLibrary().pull(name))
    return json.dumps({"name": name, "path": path}) if as_json else f"{name} is there: {path}"


def remove(name: str, *, as_json: bool) -> str:
    """Remove the model and return a line about it. Raises ConfigError."""
    freed = asyncio.run(GgufLibrary().remove(name))
    return json.dumps({"name": name, "freed_bytes": freed}) if as_json else f"Removed {name}: {_gigabytes(freed)} free."


def _table_lines(listing: LibraryListing) -> Iterator[str]:
    rows = [("NAME", "SIZE", "MEMORY", "FITS", "ON DISK", "KIND", "LICENCE"), *map(_table_row, listing.models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _table_row(model: LibraryModel) -> tuple[str, ...]:
    fits = {True: "yes", False: "no", None: "?"}[model.fits]
    return (
        model.name,
        _gigabytes(model.size_bytes),
        "?" if model.memory_bytes is None else _gigabytes(model.memory_bytes),
        "suggested" if model.is_suggested else fits,
        "" if not model.disk_bytes else "yes" if model.disk_bytes >= model.size_bytes else "partly",
        model.kind,
        model.licence,
    )


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
