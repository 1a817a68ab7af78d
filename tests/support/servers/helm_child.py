"""Child process of `helm_chart.py`: renders a chart with Helm's own engine and checks the result against the schemas of
Kubernetes. A process of its own, because the engine brings the runtime of Go along.

Reads {"chart": folder, "cases": {name: values}} from stdin and writes {name: {"documents": [...], "faults": [...]}} or
{name: {"error": ...}} to stdout, and the findings of `helm lint` under the name `lint`.
"""

import functools
import json
import sys
from typing import Any

import kubernetes_validate.utils as schemas  # type: ignore[import-untyped] # it has no types
import yaml
from helm_python import Chart, HelmError
from helm_python.chart import lint

schemas.schema_contents = functools.cache(schemas.schema_contents)  # it would read megabytes for each document
VERSIONS = ("1.27", "1.37")
"""The oldest version that the chart claims to run on, and the newest whose schemas are known here."""


def render(chart: Chart, values: dict[str, Any]) -> dict[str, Any]:
    chart.validate_schema(values)
    documents: list[dict[str, Any]] = []
    for file, text in sorted(chart.render(values=values, name="prod", namespace="ai").items()):
        if not file.endswith(".txt"):
            documents += [document for document in yaml.safe_load_all(text) if document is not None]
    return {"documents": documents, "faults": [fault for document in documents for fault in find_faults(document)]}


def find_faults(document: dict[str, Any]) -> list[str]:
    return _find_faults(json.dumps(document))


@functools.cache  # most documents are the same with most values
def _find_faults(text: str) -> list[str]:
    document = json.loads(text)
    faults: list[str] = []
    for version in VERSIONS:
        try:
            schemas.validate(document, version, strict=True)
        except schemas.SchemaNotFoundError:
            faults.append(f"no schema of {document['apiVersion']} {document['kind']}")
        except schemas.ValidationError as exc:
            faults.append(f"{version} {document['kind']} {document['metadata']['name']}: {exc.message}")
    return faults


def main() -> None:
    order = json.load(sys.stdin)
    results: dict[str, Any] = {"lint": lint(order["chart"], strict=True)}
    with Chart.load(order["chart"]) as chart:
        for name, values in order["cases"].items():
            try:
                results[name] = render(chart, values)
            except HelmError as exc:
                results[name] = {"error": str(exc)}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
