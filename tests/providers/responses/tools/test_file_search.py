"""The passages of a file search that the model gets, and the files that it can cite."""

from collections.abc import Sequence

import pytest
from openai.types import VectorStoreSearchResponse
from openai.types.vector_store_search_response import Content

from apis.tool_runtime import Source
from providers.responses.events.citations import CitationScanner
from providers.responses.tools.file_search import results_to_passages


def hits(*sizes: int) -> Sequence[VectorStoreSearchResponse]:
    return [
        VectorStoreSearchResponse(
            file_id=f"file-{n}",
            filename=f"{n}.md",
            score=1,
            attributes={},
            content=[Content(type="text", text="x" * size)],
        )
        for n, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), []),
        ((10, 20), [10, 20]),
        ((40_000, 30_000, 10), [40_000, 20_000]),
        ((60_000, 1), [60_000]),
        ((70_000,), [60_000]),
        ((0, 5), [5]),
    ],
)
def test_the_model_receives_the_best_passages_up_to_the_limit(sizes: Sequence[int], expected: list[int]) -> None:
    assert [len(source.text) for source in results_to_passages(hits(*sizes))] == expected


def test_a_passage_is_cited_by_its_file() -> None:
    (source,) = results_to_passages(hits(3))
    assert source == Source("", "0.md", "xxx", "file-0")


def test_the_mark_of_a_file_goes_and_that_of_a_page_becomes_a_link() -> None:
    scanner = CitationScanner({1: Source("", "a.md", file_id="file-1"), 2: Source("https://a.b/", "A")})
    pieces = [*scanner.feed("x\u30101\u3011y\u30102\u3011\u30101"), *scanner.feed("\u2020L1\u3011"), *scanner.flush()]
    assert pieces == [("x", None), ("", 1), ("y", None), ("([A](https://a.b/))", 2), ("", 1)]
