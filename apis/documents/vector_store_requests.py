"""The requests about vector stores, the files in them and the search over both."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from apis.wire.base import ListParams, Wire
from apis.wire.tools import FileFilter, HybridWeights, Id

MAX_BATCH_FILES = 2000

AttributeKey = Annotated[str, Field(max_length=64, pattern=r"^[^\x00]*$")]
ShortText = Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")]
VectorStoreMetadata = Annotated[dict[AttributeKey, ShortText], Field(max_length=16)]
WholeNumber = Annotated[int, Field(ge=-(2**53), le=2**53)]
Attributes = Annotated[dict[AttributeKey, ShortText | bool | WholeNumber | float], Field(max_length=16)]
Query = Annotated[str, Field(min_length=1, max_length=4096)]


class ChunkSizes(Wire):
    """The size of a chunk and the overlap of two, in tokens."""

    max_chunk_size_tokens: int = Field(default=800, ge=100, le=4096)
    chunk_overlap_tokens: int = Field(default=400, ge=0)

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.chunk_overlap_tokens > self.max_chunk_size_tokens // 2:
            raise ValueError("the overlap is more than half of the chunk")
        return self


class AutoChunking(Wire):
    type: Literal["auto"]


class StaticChunking(Wire):
    type: Literal["static"]
    static: ChunkSizes


Chunking = Annotated[AutoChunking | StaticChunking, Field(discriminator="type")]


class StoreExpiry(Wire):
    """The store is emptied `days` after its last search, update or added file."""

    anchor: Literal["last_active_at"]
    days: int = Field(ge=1, le=365)


class CreateVectorStore(Wire):
    name: ShortText | None = None
    description: ShortText | None = None
    file_ids: list[Id] | None = Field(default=None, max_length=MAX_BATCH_FILES)
    chunking_strategy: Chunking | None = None
    expires_after: StoreExpiry | None = None
    metadata: VectorStoreMetadata | None = None


class UpdateVectorStore(Wire):
    """Changes of a vector store; a field that is absent keeps its value. A null `expires_after` ends the expiry."""

    name: ShortText | None = None
    expires_after: StoreExpiry | None = None
    metadata: VectorStoreMetadata | None = None


class AddFile(Wire):
    file_id: Id
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


class AddFiles(Wire):
    """Files by id, all with the same attributes, or each with its own: one of the two."""

    file_ids: list[Id] | None = Field(default=None, min_length=1, max_length=MAX_BATCH_FILES)
    files: list[AddFile] | None = Field(default=None, min_length=1, max_length=MAX_BATCH_FILES)
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.file_ids is None) == (self.files is None):
            raise ValueError("give either file_ids or files")
        return self


class UpdateFile(Wire):
    attributes: Attributes | None


class Ranking(Wire):
    """With the ranker `none`, likeness alone counts. Chunks of a lower relevance than `score_threshold` are omitted."""

    ranker: Literal["none", "auto", "default-2024-11-15"] | None = None
    score_threshold: float | None = Field(default=None, ge=0, le=1)
    hybrid_search: HybridWeights | None = None


class SearchStores(Wire):
    """Several queries are searched for together. `rewrite_query` is accepted and changes nothing."""

    query: Query | Annotated[list[Query], Field(min_length=1, max_length=16)]
    filters: FileFilter | None = None
    max_num_results: int | None = Field(default=None, ge=1, le=50)
    ranking_options: Ranking | None = None
    rewrite_query: bool | None = None

    @property
    def limit(self) -> int:
        """How many results are wanted."""
        return self.max_num_results or 10

    @property
    def queries(self) -> Sequence[str]:
        return [self.query] if isinstance(self.query, str) else self.query


class VectorStoreListParams(ListParams):
    """Query of a listing of vector stores; `after` and `before` are ids of others of the list."""

    before: str | None = Field(default=None, max_length=256)


class VectorStoreFileListParams(VectorStoreListParams):
    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None
