"""What a filter says of attributes, decided here or put into SQL."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from apis.vector_index import AttributeValue
from apis.wire.tools import ComparisonFilter, CompoundFilter, FileFilter

_ORDER_OPERATORS: Final = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def matches(filters: FileFilter | None, attributes: Mapping[str, AttributeValue]) -> bool:
    """Whether a chunk with these attributes is among those that the filter leaves."""
    match filters:
        case None:
            return True
        case CompoundFilter(type="and"):
            return all(matches(each, attributes) for each in filters.filters)
        case CompoundFilter():
            return any(matches(each, attributes) for each in filters.filters)
        case ComparisonFilter():
            return _matches_comparison(filters, attributes.get(filters.key))


def _matches_comparison(comparison: ComparisonFilter, attribute: AttributeValue | None) -> bool:
    wanted = comparison.value
    candidates: list[Any] = wanted if isinstance(wanted, list) else [wanted]
    if comparison.type in ("eq", "in", "ne", "nin"):
        equal = any(_value_kind(each) == _value_kind(attribute) and each == attribute for each in candidates)
        return equal == (comparison.type in ("eq", "in"))
    if isinstance(wanted, list | bool) or isinstance(attribute, bool) or _value_kind(wanted) != _value_kind(attribute):
        return False
    left: Any = attribute
    right: Any = wanted
    match comparison.type:
        case "gt":
            return left > right
        case "gte":
            return left >= right
        case "lt":
            return left < right
        case "lte":
            return left <= right


def _value_kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number" if isinstance(value, int | float) else "nothing"


class SqlDialect(Protocol):
    """How one database compares an attribute: each returns a condition that is never NULL."""

    def render_equality(self, key: str, value: AttributeValue) -> str: ...

    def render_order(self, key: str, operator: str, value: str | float) -> str: ...


def filter_to_sql(filters: FileFilter, dialect: SqlDialect) -> str:
    """The filter as a condition. No value of it is in the text: the dialect binds them."""
    match filters:
        case CompoundFilter():
            joined = f" {filters.type.upper()} ".join(filter_to_sql(each, dialect) for each in filters.filters)
            return f"({joined or ('TRUE' if filters.type == 'and' else 'FALSE')})"
        case ComparisonFilter(type="eq" | "in" | "ne" | "nin"):
            values: list[Any] = filters.value if isinstance(filters.value, list) else [filters.value]
            equal = " OR ".join(dialect.render_equality(filters.key, value) for value in values) or "FALSE"
            return f"({equal})" if filters.type in ("eq", "in") else f"(NOT ({equal}))"
        case ComparisonFilter():
            if isinstance(filters.value, list | bool):
                return "FALSE"
            return dialect.render_order(filters.key, _ORDER_OPERATORS[filters.type], filters.value)
