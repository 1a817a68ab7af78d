"""VectorIndex: pieces of text with their vectors and attributes, found by likeness and by words."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apis.provider import Provider
from apis.wire.tools import FileFilter

AttributeValue = str | bool | int | float
"""The value of an attribute. Numbers compare as numbers; text by its code points; a boolean equals only a boolean."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a file. `number` is its place in the file, from 0. `attributes` are the file's."""

    file: str
    number: int
    text: str
    attributes: Mapping[str, AttributeValue]
    vector: Sequence[float]


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk that a search found, and how well it fits: more is better, on a scale that the search says."""

    file: str
    number: int
    text: str
    attributes: Mapping[str, AttributeValue]
    score: float


@dataclass(frozen=True, slots=True)
class Search:
    """Where to search, for how many, and among which chunks. Of equals, the first file's first chunk comes first."""

    store: str
    limit: int
    filters: FileFilter | None = None


class VectorIndex(Provider, ABC):
    """Stores of chunks. The name of a `store` begins with its tenant. Nothing crosses from one store to another,
    and the chunks of one do not change the scores of another.

    Promises, the same for every provider (tests/conformance/vector_index.py):
    - What a returned call did is seen by every later search of any client of the index, and outlives the process.
    - Searches are exact: what fits best is found, also where the filters leave little.
    - Filters: `ne` and `nin` fit what lacks the attribute, all others do not. `gt`, `gte`, `lt` and `lte` fit only
      where both sides are numbers, or both text.
    - No text or attribute, given or asked for, holds NUL. All vectors of a store have one length, and only those of
      the query's length are found.
    - No call waits for ever: StoreUnavailable is raised when the index cannot be reached or is too slow.
    """

    async def identity(self) -> str:
        """Return the id of the file that holds the chunks, where only the processes of one machine have them; empty
        for an index that all machines share, which is the default."""
        return ""

    @abstractmethod
    async def upsert(self, store: str, chunks: Sequence[Chunk]) -> None:
        """Put the chunks, all or none; one with the same file and number is replaced."""

    @abstractmethod
    async def set_attributes(self, store: str, file: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Give all chunks of the file these attributes instead of theirs."""

    @abstractmethod
    async def delete(self, store: str, file: str | None = None) -> None:
        """Forget the file's chunks, or the whole store. No error when there are none."""

    @abstractmethod
    async def search_vector(self, search: Search, vector: Sequence[float]) -> list[ScoredChunk]:
        """The chunks whose vectors point most nearly the same way; `score` is the cosine, from -1 to 1.

        A zero vector points nowhere: it has the cosine 0 with all others.
        """

    @abstractmethod
    async def search_keywords(self, search: Search, text: str) -> list[ScoredChunk]:
        """The chunks that hold words of `text`, or other forms of them, the ones with more and rarer words first.

        Any text is a query: it has no syntax. The commonest words of all may be left out. `score` is positive,
        comparable within one answer only.
        """
