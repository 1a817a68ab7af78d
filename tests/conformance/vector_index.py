"""The promises of VectorIndex as tests: an index's test class inherits them and has a fixture `opening`."""

import asyncio
import math
import random
from array import array
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from pydantic import TypeAdapter

from apis.documents.vector_index import AttributeValue, Chunk, ScoredChunk, Search, VectorIndex
from apis.errors import StoreUnavailable
from apis.wire.tools import FileFilter

BOUND_S = 60
FILTER: TypeAdapter[FileFilter] = TypeAdapter(FileFilter)
Opening = Callable[[], Awaitable[VectorIndex]]


def chunk(
    file: str, number: int = 0, text: str = "", vector: tuple[float, ...] = (1.0, 0.0), **attributes: AttributeValue
) -> Chunk:
    return Chunk(file, number, text, attributes, vector)


def where(filters: Mapping[str, Any], store: str = "s") -> Search:
    return Search(store, 100, FILTER.validate_python(filters))


def files(results: list[ScoredChunk]) -> list[str]:
    return [each.file for each in results]


def cosine(first: "array[float]", right: "array[float]") -> float:
    norm = math.hypot(*first) * math.hypot(*right)
    return sum(a * b for a, b in zip(first, right, strict=True)) / norm if norm else 0.0


ATTRIBUTES: dict[str, dict[str, AttributeValue]] = {
    "a": {"year": 1999, "lang": "en", "free": True},
    "b": {"year": 2001.5, "lang": "de", "free": False},
    "c": {"year": "1999", "lang": "É"},
    "d": {'q"u$o.te[0]': "x", "lang": "e\u0301", "": 1},
    "e": {},
}
FILTERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "eq", "key": "year", "value": 1999}, "a"),
    ({"type": "eq", "key": "year", "value": 1999.0}, "a"),
    ({"type": "eq", "key": "year", "value": "1999"}, "c"),
    ({"type": "ne", "key": "year", "value": 1999}, "bcde"),
    ({"type": "eq", "key": "free", "value": True}, "a"),
    ({"type": "eq", "key": "free", "value": 1}, ""),
    ({"type": "eq", "key": "", "value": True}, ""),
    ({"type": "eq", "key": "", "value": 1}, "d"),
    ({"type": "ne", "key": "free", "value": False}, "acde"),
    ({"type": "gt", "key": "year", "value": 1999}, "b"),
    ({"type": "gte", "key": "year", "value": 1999}, "ab"),
    ({"type": "lt", "key": "year", "value": 2001.5}, "a"),
    ({"type": "lte", "key": "year", "value": 2001.5}, "ab"),
    ({"type": "gte", "key": "year", "value": "1999"}, "c"),
    ({"type": "gt", "key": "free", "value": False}, ""),
    ({"type": "gt", "key": "lang", "value": "en"}, "cd"),
    ({"type": "lt", "key": "lang", "value": "en"}, "b"),
    ({"type": "in", "key": "lang", "value": ["de", "en", 3]}, "ab"),
    ({"type": "nin", "key": "lang", "value": ["de", "en"]}, "cde"),
    ({"type": "in", "key": "year", "value": []}, ""),
    ({"type": "nin", "key": "year", "value": []}, "abcde"),
    ({"type": "eq", "key": 'q"u$o.te[0]', "value": "x"}, "d"),
    ({"type": "eq", "key": "year", "value": "1999' OR 1=1 --"}, ""),
    ({"type": "and", "filters": []}, "abcde"),
    ({"type": "or", "filters": []}, ""),
]


class VectorIndexPromises:
    """The promises of every index."""

    @pytest.fixture
    async def index(self, opening: Opening) -> VectorIndex:
        return await opening()

    async def test_the_likest_comes_first_with_its_cosine(self, index: VectorIndex) -> None:
        await index.upsert("s", [chunk("a", 0, "north", (0.0, 2.0)), chunk("b", 0, "east", (3.0, 0.0), n=1)])
        hits = await index.search_vector(Search("s", 10), (1.0, 1.0))
        assert [(each.file, each.text) for each in hits] == [("a", "north"), ("b", "east")]  # equals: by file
        assert [each.score for each in hits] == pytest.approx([math.sqrt(0.5)] * 2, abs=1e-6)
        (best,) = await index.search_vector(Search("s", 1), (1.0, 0.0))
        assert (best.file, best.number, best.attributes, best.score) == ("b", 0, {"n": 1}, pytest.approx(1, abs=1e-6))

    async def test_search_agrees_with_a_plain_computation(self, index: VectorIndex) -> None:
        dice = random.Random(5)
        vectors = [array("f", [dice.gauss(0, 1) for _ in range(48)]) for _ in range(600)]
        await index.upsert("s", [Chunk(f"f{i % 7}", i, "", {"i": i}, vector) for i, vector in enumerate(vectors)])
        for _ in range(5):
            query_vector = array("f", [dice.gauss(0, 1) for _ in range(48)])
            limit = dice.randrange(100, 600)
            search = Search("s", 20, FILTER.validate_python({"type": "lt", "key": "i", "value": limit}))
            hits = await index.search_vector(search, query_vector)
            best = sorted(range(limit), key=lambda i: -cosine(vectors[i], query_vector))[:20]
            assert [each.number for each in hits] == best
            assert [each.score for each in hits] == pytest.approx(
                [cosine(vectors[i], query_vector) for i in best], abs=1e-5
            )

    async def test_zeros_point_nowhere_and_other_lengths_are_not_found(self, index: VectorIndex) -> None:
        await index.upsert("s", [chunk("zero", vector=(0.0, 0.0)), chunk("back", vector=(-1.0, 0.0))])
        assert [(f.file, f.score) for f in await index.search_vector(Search("s", 9), (1.0, 0.0))] == [
            ("zero", 0.0),
            ("back", -1.0),
        ]
        assert [f.score for f in await index.search_vector(Search("s", 9), (0.0, 0.0))] == [0.0, 0.0]
        assert await index.search_vector(Search("s", 9), (1.0, 0.0, 0.0)) == []

    async def test_rarer_and_more_words_come_first_in_any_form(self, index: VectorIndex) -> None:
        texts = [
            "The ships sailed.",
            "The whale surfaced near ships.",
            "A harbour.",
            "Ships, ships and whales!",
            "A ship.",
        ]
        await index.upsert("s", [chunk("f", number, text) for number, text in enumerate(texts)])
        hits = await index.search_keywords(Search("s", 10), "whale ship?")
        assert {each.number for each in hits[:2]} == {1, 3}
        assert {each.number for each in hits} == {0, 1, 3, 4}
        scores = [each.score for each in hits]
        assert scores == sorted(scores, reverse=True)
        assert min(scores) > 0
        assert len(await index.search_keywords(Search("s", 2), "ships")) == 2

    @pytest.mark.parametrize(
        "text",
        [
            "",
            " ",
            '"',
            "'",
            "a AND",
            "NEAR(",
            "text: x",
            "* ^ - +",
            "(",
            "& | !",
            "x" * 100_000,
            "w " * 10_000,
            "é\u202e\\",
        ],
    )
    async def test_any_text_is_a_query(self, index: VectorIndex, text: str) -> None:
        await index.upsert("s", [chunk("f", 0, "nothing of it")])
        assert await index.search_keywords(Search("s", 10), text) == []

    async def test_stores_do_not_see_or_weigh_each_other(self, index: VectorIndex) -> None:
        mine = [chunk("f", 0, "red apple"), chunk("f", 1, "green apple"), chunk("f", 2, "red pear")]
        await index.upsert("t/one", mine)
        before = await index.search_keywords(Search("t/one", 10), "red apple")
        await index.upsert("t/two", [chunk("f", number, "red red red") for number in range(50)])
        assert await index.search_keywords(Search("t/one", 10), "red apple") == before
        assert len(await index.search_vector(Search("t/one", 100), (1.0, 0.0))) == 3
        assert await index.search_vector(Search("t/", 100), (1.0, 0.0)) == []
        await index.delete("t/two")
        assert len(await index.search_vector(Search("t/one", 100), (1.0, 0.0))) == 3

    async def test_the_same_place_is_replaced_and_files_are_deleted(self, index: VectorIndex) -> None:
        await index.upsert("s", [chunk("a", 0, "old words"), chunk("a", 1, "kept"), chunk("b", 0, "pebble")])
        await index.upsert("s", [chunk("a", 0, "new", (0.0, 1.0))])
        assert await index.search_keywords(Search("s", 9), "old words") == []
        assert [each.number for each in await index.search_keywords(Search("s", 9), "new")] == [0]
        assert [each.text for each in await index.search_vector(Search("s", 1), (0.0, 1.0))] == ["new"]
        await index.delete("s", "a")
        assert files(await index.search_vector(Search("s", 9), (1.0, 0.0))) == ["b"]
        assert await index.search_keywords(Search("s", 9), "new kept") == []
        await index.delete("s")
        await index.delete("s")
        await index.delete("s", "b")
        assert await index.search_vector(Search("s", 9), (1.0, 0.0)) == []
        await index.upsert("s", [chunk("b", 0, "pebble again")])
        assert files(await index.search_keywords(Search("s", 9), "pebble")) == ["b"]

    @pytest.mark.parametrize(("filters", "file_names"), FILTERS, ids=str)
    async def test_filters_leave_what_they_say(
        self, index: VectorIndex, filters: dict[str, Any], file_names: str
    ) -> None:
        await index.upsert(
            "s", [Chunk(file, 0, "word", input_items, (1.0, 0.0)) for file, input_items in ATTRIBUTES.items()]
        )
        assert files(await index.search_vector(where(filters), (1.0, 0.0))) == list(file_names)
        assert sorted(files(await index.search_keywords(where(filters), "word"))) == list(file_names)

    async def test_filters_combine_deeply(self, index: VectorIndex) -> None:
        await index.upsert(
            "s", [Chunk(file, 0, "word", input_items, (1.0, 0.0)) for file, input_items in ATTRIBUTES.items()]
        )
        dice = random.Random(7)
        simple = [each for each in FILTERS if each[0]["type"] not in ("and", "or")]
        for _ in range(30):
            filters, file_names = dice.choice(simple)
            expected = set(file_names)
            for _ in range(12):
                other, other_left = dice.choice(simple)
                kind = dice.choice(["and", "or"])
                filters = {"type": kind, "filters": [filters, other]}
                expected = expected & set(other_left) if kind == "and" else expected | set(other_left)
            assert set(files(await index.search_vector(where(filters), (1.0, 0.0)))) == expected

    async def test_attributes_are_replaced_for_all_of_a_file(self, index: VectorIndex) -> None:
        await index.upsert("s", [chunk("a", 0, x=1), chunk("a", 1, x=1), chunk("b", 0, x=1)])
        await index.set_attributes("s", "a", {"y": "z"})
        hits = await index.search_vector(where({"type": "eq", "key": "y", "value": "z"}), (1.0, 0.0))
        assert [(each.file, each.number, each.attributes) for each in hits] == [
            ("a", 0, {"y": "z"}),
            ("a", 1, {"y": "z"}),
        ]
        await index.set_attributes("none", "a", {"y": "z"})

    async def test_it_is_there_for_others_and_after_a_restart(self, opening: Opening) -> None:
        one, other = await opening(), await opening()
        await one.upsert("s", [chunk("a", 0, "kept")])
        assert files(await other.search_keywords(Search("s", 9), "kept")) == ["a"]
        await one.close()
        with pytest.raises(StoreUnavailable):
            await one.search_keywords(Search("s", 9), "kept")
        again = await opening()
        assert files(await again.search_vector(Search("s", 9), (1.0, 0.0))) == ["a"]

    async def test_many_at_once(self, opening: Opening) -> None:
        async with asyncio.timeout(BOUND_S):
            clients = await asyncio.gather(*[opening() for _ in range(3)])  # all of them find no schema
            writes = [
                client.upsert("s", [chunk(f"{n}-{i}", number, "word") for number in range(5)])
                for n, client in enumerate(clients)
                for i in range(10)
            ]
            searches = [client.search_keywords(Search("s", 5), "word") for client in clients for _ in range(5)]
            await asyncio.gather(*writes, *searches)
            assert len(await clients[0].search_vector(Search("s", 1000), (1.0, 0.0))) == 150

    async def test_nothing_is_nothing(self, index: VectorIndex) -> None:
        await index.upsert("s", [])
        assert await index.search_vector(Search("s", 9), (1.0, 0.0)) == []
        assert await index.search_keywords(Search("s", 9), "word") == []
