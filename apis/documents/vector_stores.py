"""VectorStores: uploaded files, made searchable."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from openai.types.vector_store import VectorStore
from openai.types.vector_store_search_response import VectorStoreSearchResponse
from openai.types.vector_stores import FileContentResponse, VectorStoreFile, VectorStoreFileBatch
from pydantic import Field, model_validator

from apis.provider import Provider
from apis.storage.pages import Page
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


class VectorStores(Provider, ABC):
    """Vector stores, the files in them and the search over both. All that takes ids raises NotFound for one that is
    not there, or that is another tenant's.

    Promises:
    - A file is `in_progress` until it can be found by a search (`completed`) or has turned out unreadable (`failed`,
      and `last_error` says why). That work outlives the process it began in.
    - What was deleted is no longer found: chunks, text and attributes go with the file, files with the store. Nothing
      that runs at the same time brings a deleted store back.
    - A file fails after four processes have ended while they worked on it, one after the other.
    """

    @abstractmethod
    async def create(self, request: CreateVectorStore, *, tenant: str) -> VectorStore:
        """A new store, with the files of `file_ids` in progress."""

    @abstractmethod
    async def get(self, store_id: str, *, tenant: str) -> VectorStore:
        """The store as it is now."""

    @abstractmethod
    async def update(self, store_id: str, request: UpdateVectorStore, *, tenant: str) -> VectorStore:
        """Change what the request names."""

    @abstractmethod
    async def list(self, params: VectorStoreListParams, *, tenant: str) -> Page[VectorStore]:
        """The tenant's stores, by the time they were made."""

    @abstractmethod
    async def delete(self, store_id: str, *, tenant: str) -> None:
        """Forget the store, with all that was made of its files. The files themselves stay. A damaged store can be
        deleted, too."""

    @abstractmethod
    async def delete_all(self, *, tenant: str) -> None:
        """Delete all the tenant's stores, also damaged ones, which no list shows."""

    @abstractmethod
    async def check(self, store_id: str, *, tenant: str) -> None:
        """Nothing, where the store is there and has not expired."""

    @abstractmethod
    async def search(
        self, store_ids: Sequence[str], request: SearchStores, *, tenant: str
    ) -> Sequence[VectorStoreSearchResponse]:
        """The chunks of all these stores that fit best, best first, with scores from 0 to 1.

        A score is the chunk's relevance to that of the queries which it fits best: the mean of its cosine, 0 for a
        negative one, and of its words' score, weighted by `hybrid_search` (default: 1 and 0.25). The words' score is
        the share of the query's words in the chunk, less for a chunk that is far down among those with rare words. A
        query that fits nothing scores near 0. With the ranker `none` the score is the cosine. Raises the errors of
        `embed`.
        """

    @abstractmethod
    async def add_file(self, store_id: str, request: AddFile, *, tenant: str) -> VectorStoreFile:
        """Begin to make a file searchable; a file of the store begins again."""

    @abstractmethod
    async def get_file(self, store_id: str, file_id: str, *, tenant: str) -> VectorStoreFile:
        """The file as it stands in the store."""

    @abstractmethod
    async def list_files(
        self, store_id: str, params: VectorStoreFileListParams, *, batch_id: str | None = None, tenant: str
    ) -> Page[VectorStoreFile]:
        """The files of the store, or of one batch, by the time they were added."""

    @abstractmethod
    async def update_file(self, store_id: str, file_id: str, request: UpdateFile, *, tenant: str) -> VectorStoreFile:
        """Give the file these attributes instead of its own."""

    @abstractmethod
    async def delete_file(self, store_id: str, file_id: str, *, tenant: str) -> None:
        """Take the file out of the store."""

    @abstractmethod
    async def file_content(self, store_id: str, file_id: str, *, tenant: str) -> Sequence[FileContentResponse]:
        """The text that was read out of the file; empty while there is none."""

    @abstractmethod
    async def forget_file(self, file_id: str, *, tenant: str) -> None:
        """Take a file out of all the tenant's stores. No error when it is in none."""

    @abstractmethod
    async def add_files(self, store_id: str, request: AddFiles, *, tenant: str) -> VectorStoreFileBatch:
        """Add many files as one batch."""

    @abstractmethod
    async def get_batch(self, store_id: str, batch_id: str, *, tenant: str) -> VectorStoreFileBatch:
        """The batch, with its files counted as they are now."""

    @abstractmethod
    async def cancel_batch(self, store_id: str, batch_id: str, *, tenant: str) -> VectorStoreFileBatch:
        """Stop what of the batch is still in progress."""
