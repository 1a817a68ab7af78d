"""Conversations: items that outlive responses, which responses can be turns of."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from openai.types.conversations import Conversation
from pydantic import Field

from apis.storage.pages import Page
from apis.wire.base import Includable, Metadata, Wire
from apis.wire.items import Item

Items = Annotated[list[Item], Field(max_length=20, fail_fast=True)]


class CreateConversation(Wire):
    """A new conversation, of up to 20 items. Null means unset."""

    items: Items | None = None
    metadata: Metadata | None = None


class UpdateConversation(Wire):
    """Its metadata are these from now on; null is none."""

    metadata: Metadata | None


class AddItems(Wire):
    """Up to 20 items that are put at the end."""

    items: Items


class ItemInclude(Wire):
    """What is to be shown of items. It is checked, and changes nothing: an item is shown as it was made, with what the
    response that made it included."""

    include: list[Includable] | None = None


class ItemListParams(ItemInclude):
    """Which of a conversation's items to list; `after` is the id of the last one seen."""

    after: str | None = Field(default=None, max_length=256)
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class Conversations(ABC):
    """Conversations by ids that the server makes, kept until they are deleted. Another tenant's id is an unknown id.

    An item has an id of its own within its conversation, the one it came with or a new one. While a response is being
    made in a conversation its items are that response's alone: whoever else would change them gets
    ConversationLocked. Every method raises NotFound for an unknown conversation.
    """

    @abstractmethod
    async def create(self, request: CreateConversation, *, tenant: str) -> Conversation:
        """Make a conversation. Raises as `add` does."""

    @abstractmethod
    async def get(self, conversation_id: str, *, tenant: str) -> Conversation:
        """The conversation, without its items."""

    @abstractmethod
    async def update(self, conversation_id: str, request: UpdateConversation, *, tenant: str) -> Conversation:
        """Change its metadata, at any time."""

    @abstractmethod
    async def delete(self, conversation_id: str, *, tenant: str) -> None:
        """Forget it and all its items. A response that is being made in it fails; those that were are kept."""

    @abstractmethod
    async def add_items(self, conversation_id: str, request: AddItems, *, tenant: str) -> Sequence[dict[str, Any]]:
        """Put items at the end, all or none; returns them as they are kept.

        Raises InvalidRequest for an id that the conversation has, NotFound for a reference to what is not there.
        """

    @abstractmethod
    async def list_items(self, conversation_id: str, params: ItemListParams, *, tenant: str) -> Page[dict[str, Any]]:
        """Some of its items. Raises InvalidRequest for an `after` that it does not have."""

    @abstractmethod
    async def get_item(self, conversation_id: str, item_id: str, *, tenant: str) -> dict[str, Any]:
        """One of its items. Raises NotFound."""

    @abstractmethod
    async def delete_item(self, conversation_id: str, item_id: str, *, tenant: str) -> Conversation:
        """Take an item out of it; returns the conversation. Raises NotFound."""
