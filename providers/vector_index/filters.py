"""Filters on attributes as SQL conditions."""

from typing import Any, Final, Protocol

from apis.documents.vector_index import AttributeValue
from apis.wire.tools import ComparisonFilter, CompoundFilter, FileFilter

_ORDER_OPERATORS: Final = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


class SqlDialect(Protocol):
    """The comparisons of one database: each method returns a condition that is never NULL."""

    def render_equality(self, key: str, value: AttributeValue) -> str: ...

    def render_order(self, key: str, operator: str, value: str | float) -> str: ...


def filter_to_sql(filters: FileFilter, dialect: SqlDialect) -> str:
    """Return the filter as a condition. Its text holds no value: the dialect binds them."""
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
