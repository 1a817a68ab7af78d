"""The Conversations API: items that outlive responses. A response can be a turn of a conversation."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, cast

from openai.types.conversations import Conversation
from pydantic import Field

from apis.errors import Unsupported
from apis.storage.pages import Page
from apis.wire.base import Includable, ListParams, Metadata, Wire
from apis.wire.items import Item

Items = Annotated[list[Item], Field(max_length=20, fail_fast=True)]


class CreateConversation(Wire):
    """A request for a new conversation of up to 20 items. Null means unset."""

    items: Items | None = None
    metadata: Metadata | None = None


class UpdateConversation(Wire):
    """The new metadata of a conversation; null removes all."""

    metadata: Metadata | None


class AddItems(Wire):
    """Up to 20 items to append."""

    items: Items


class ItemInclude(Wire):
    """The `include` of a request for items: the parts of them that it shows. All parts are stored, also those that the
    request that created the items did not include."""

    include: list[Includable] | None = None


class ItemListParams(ListParams, ItemInclude):
    """Query of a listing of a conversation's items."""


class ConversationListParams(ListParams):
    """Query of a listing of conversations, an extension of OpenAI's API."""

    after: str | None = Field(default=None, max_length=128)
    search: str | None = Field(default=None, max_length=256)

    def accepts(self, conversation: Conversation) -> bool:
        """Return True for one of those that are listed: `search` matches a part of the id or the metadata, in any case
        of letters."""
        metadata = cast(dict[str, str], conversation.metadata or {})
        return contains_text(self.search, (conversation.id, *metadata, *metadata.values()))


def contains_text(searched: str | None, texts: Iterable[str]) -> bool:
    """Return True if one of the texts contains `searched` in any case of letters, or if nothing is searched."""
    folded = (searched or "").casefold()
    return not folded or any(folded in text.casefold() for text in texts)


class Conversations(ABC):
    """Conversations, stored under the server's ids until they are deleted. Another tenant's id is an unknown id.

    An item has its own id within its conversation: its client's, or a new one. While a response runs in a conversation,
    only that response can change the items; other changes raise ConversationLocked. Every method raises NotFound for
    an unknown conversation.
    """

    @abstractmethod
    async def create(self, request: CreateConversation, *, tenant: str) -> Conversation:
        """Create a conversation. Raises as `add_items`."""

    @abstractmethod
    async def require(self, conversation_id: str, *, tenant: str) -> None:
        """Create an empty conversation of this id, which the server has chosen, unless there is one."""

    async def list(self, params: ConversationListParams, *, tenant: str) -> Page[Conversation]:
        """Return a page of the tenant's conversations, newest first by default."""
        raise Unsupported("This server cannot list conversations.", code="not_configured")

    @abstractmethod
    async def get(self, conversation_id: str, *, tenant: str) -> Conversation:
        """Return the conversation without its items."""

    @abstractmethod
    async def update(self, conversation_id: str, request: UpdateConversation, *, tenant: str) -> Conversation:
        """Change the metadata, also while a response runs, and return the conversation."""

    @abstractmethod
    async def delete(self, conversation_id: str, *, tenant: str) -> None:
        """Delete the conversation and all its items. A running response in it fails; finished ones stay stored."""

    @abstractmethod
    async def add_items(
        self, conversation_id: str, request: AddItems, *, include: Sequence[str] = (), tenant: str
    ) -> Sequence[dict[str, Any]]:
        """Append items, all or none, and return them with the parts that `include` names.

        Raises InvalidRequest for an id that the conversation already has, NotFound for a reference to a missing item.
        """

    @abstractmethod
    async def list_items(self, conversation_id: str, params: ItemListParams, *, tenant: str) -> Page[dict[str, Any]]:
        """Return one page of items. Raises InvalidRequest for an unknown `after`."""

    @abstractmethod
    async def get_item(
        self, conversation_id: str, item_id: str, *, include: Sequence[str] = (), tenant: str
    ) -> dict[str, Any]:
        """Return one item with the parts that `include` names. Raises NotFound."""

    @abstractmethod
    async def delete_item(self, conversation_id: str, item_id: str, *, tenant: str) -> Conversation:
        """Delete an item and return the conversation. Raises NotFound."""
