"""The table of item types against the items that a request may hold, and the registry of tools."""

from typing import get_args

from apis.wire.item_types import HOSTED_CALL_TYPES, ITEM_TYPES
from apis.wire.items import Item
from providers.responses.tools.registry import TYPES_BY_CALL_ITEM


def test_the_table_has_every_item_of_a_request_and_no_other() -> None:
    tags = {get_args(each)[1].tag.partition(":")[0] for each in get_args(get_args(Item)[0])}
    assert tags == ITEM_TYPES.keys()


def test_no_two_types_share_an_id_prefix() -> None:
    prefixes = [row.id_prefix for row in ITEM_TYPES.values() if row.id_prefix]
    assert len(prefixes) == len(set(prefixes))


def test_every_hosted_call_is_read_by_a_tool_of_the_registry() -> None:
    readable = {get_args(item.model_fields["type"].annotation)[0] for item in TYPES_BY_CALL_ITEM}
    assert readable >= HOSTED_CALL_TYPES
