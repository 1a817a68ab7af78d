"""VectorStores: uploaded files, made searchable."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from apis.provider import Provider
from apis.storage.pages import Page

if TYPE_CHECKING:  # only the servers that have vector stores load their modules
    from openai.types.vector_store import VectorStore
    from openai.types.vector_store_search_response import VectorStoreSearchResponse
    from openai.types.vector_stores import FileContentResponse, VectorStoreFile, VectorStoreFileBatch

    from apis.documents.vector_store_requests import (
        AddFile,
        AddFiles,
        CreateVectorStore,
        SearchStores,
        UpdateFile,
        UpdateVectorStore,
        VectorStoreFileListParams,
        VectorStoreListParams,
    )


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
    async def create(self, request: "CreateVectorStore", *, tenant: str) -> "VectorStore":
        """A new store, with the files of `file_ids` in progress."""

    @abstractmethod
    async def get(self, store_id: str, *, tenant: str) -> "VectorStore":
        """The store as it is now."""

    @abstractmethod
    async def update(self, store_id: str, request: "UpdateVectorStore", *, tenant: str) -> "VectorStore":
        """Change what the request names."""

    @abstractmethod
    async def list(self, params: "VectorStoreListParams", *, tenant: str) -> "Page[VectorStore]":
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
        self, store_ids: Sequence[str], request: "SearchStores", *, tenant: str
    ) -> "Sequence[VectorStoreSearchResponse]":
        """The chunks of all these stores that fit best, best first, with scores from 0 to 1.

        A score is the chunk's relevance to that of the queries which it fits best: the mean of its cosine, 0 for a
        negative one, and of its words' score, weighted by `hybrid_search` (default: 1 and 0.25). The words' score is
        the share of the query's words in the chunk, less for a chunk that is far down among those with rare words. A
        query that fits nothing scores near 0. With the ranker `none` the score is the cosine. Raises the errors of
        `embed`.
        """

    @abstractmethod
    async def add_file(self, store_id: str, request: "AddFile", *, tenant: str) -> "VectorStoreFile":
        """Begin to make a file searchable; a file of the store begins again."""

    @abstractmethod
    async def get_file(self, store_id: str, file_id: str, *, tenant: str) -> "VectorStoreFile":
        """The file as it stands in the store."""

    @abstractmethod
    async def list_files(
        self, store_id: str, params: "VectorStoreFileListParams", *, batch_id: str | None = None, tenant: str
    ) -> "Page[VectorStoreFile]":
        """The files of the store, or of one batch, by the time they were added."""

    @abstractmethod
    async def update_file(
        self, store_id: str, file_id: str, request: "UpdateFile", *, tenant: str
    ) -> "VectorStoreFile":
        """Give the file these attributes instead of its own."""

    @abstractmethod
    async def delete_file(self, store_id: str, file_id: str, *, tenant: str) -> None:
        """Take the file out of the store."""

    @abstractmethod
    async def file_content(self, store_id: str, file_id: str, *, tenant: str) -> "Sequence[FileContentResponse]":
        """The text that was read out of the file; empty while there is none."""

    @abstractmethod
    async def forget_file(self, file_id: str, *, tenant: str) -> None:
        """Take a file out of all the tenant's stores. No error when it is in none."""

    @abstractmethod
    async def add_files(self, store_id: str, request: "AddFiles", *, tenant: str) -> "VectorStoreFileBatch":
        """Add many files as one batch."""

    @abstractmethod
    async def get_batch(self, store_id: str, batch_id: str, *, tenant: str) -> "VectorStoreFileBatch":
        """The batch, with its files counted as they are now."""

    @abstractmethod
    async def cancel_batch(self, store_id: str, batch_id: str, *, tenant: str) -> "VectorStoreFileBatch":
        """Stop what of the batch is still in progress."""
