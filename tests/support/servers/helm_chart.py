"""The Helm chart of distributions/kubernetes, rendered as `helm template` does it."""

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHART = Path(__file__).resolve().parents[3] / "distributions" / "kubernetes" / "responses-stack"


@dataclass(frozen=True)
class Rendered:
    """Documents of one set of values, with the faults that the schemas of Kubernetes find, or the error of Helm."""

    documents: list[dict[str, Any]]
    faults: list[str]
    error: str

    def find(self, kind: str, suffix: str = "") -> dict[str, Any]:
        """The one document of a kind, whose name ends so after that of the release."""
        name = f"prod-responses-stack{suffix}"
        (document,) = (each for each in self.documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
        return document

    def kinds(self) -> set[str]:
        return {document["kind"] for document in self.documents}


def render_charts(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Rendered]:
    """Render the chart once for each set of values, in one child process."""
    return {
        name: Rendered(result.get("documents", []), result.get("faults", []), result.get("error", ""))
        for name, result in _run_child(json.dumps(cases)).items()
        if name != "lint"
    }


def lint_chart() -> dict[str, Any]:
    return _run_child("{}")["lint"]


@functools.cache
def _run_child(cases: str) -> dict[str, Any]:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk has wheels for Linux on x86-64 only")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("helm_child.py"))],
        input=f'{{"chart": {json.dumps(str(CHART))}, "cases": {cases}}}',
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
