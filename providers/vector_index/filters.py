"""What a filter says of attributes, decided here or put into SQL."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from apis.vector_index import Value
from apis.wire.tools import ComparisonFilter, CompoundFilter, FileFilter

_ORDERS: Final = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def matches(filters: FileFilter | None, attributes: Mapping[str, Value]) -> bool:
    """Whether a chunk with these attributes is among those that the filter leaves."""
    match filters:
        case None:
            return True
        case CompoundFilter(type="and"):
            return all(matches(each, attributes) for each in filters.filters)
        case CompoundFilter():
            return any(matches(each, attributes) for each in filters.filters)
        case ComparisonFilter():
            return _compares(filters, attributes.get(filters.key))


def _compares(asked: ComparisonFilter, given: Value | None) -> bool:
    wanted = asked.value
    candidates: list[Any] = wanted if isinstance(wanted, list) else [wanted]
    if asked.type in ("eq", "in", "ne", "nin"):
        equal = any(_kind(each) == _kind(given) and each == given for each in candidates)
        return equal == (asked.type in ("eq", "in"))
    if isinstance(wanted, list | bool) or isinstance(given, bool) or _kind(wanted) != _kind(given):
        return False
    left: Any = given
    right: Any = wanted
    match asked.type:
        case "gt":
            return left > right
        case "gte":
            return left >= right
        case "lt":
            return left < right
        case "lte":
            return left <= right


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number" if isinstance(value, int | float) else "nothing"


class Dialect(Protocol):
    """How one database compares an attribute: each returns a condition that is never NULL."""

    def equal(self, key: str, value: Value) -> str: ...

    def ordered(self, key: str, sign: str, value: str | float) -> str: ...


def to_sql(filters: FileFilter, dialect: Dialect) -> str:
    """The filter as a condition. No value of it is in the text: the dialect binds them."""
    match filters:
        case CompoundFilter():
            joined = f" {filters.type.upper()} ".join(to_sql(each, dialect) for each in filters.filters)
            return f"({joined or ('TRUE' if filters.type == 'and' else 'FALSE')})"
        case ComparisonFilter(type="eq" | "in" | "ne" | "nin"):
            values: list[Any] = filters.value if isinstance(filters.value, list) else [filters.value]
            equal = " OR ".join(dialect.equal(filters.key, value) for value in values) or "FALSE"
            return f"({equal})" if filters.type in ("eq", "in") else f"(NOT ({equal}))"
        case ComparisonFilter():
            if isinstance(filters.value, list | bool):
                return "FALSE"
            return dialect.ordered(filters.key, _ORDERS[filters.type], filters.value)
