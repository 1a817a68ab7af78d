"""Brave: the `search` tool over the API of Brave Search."""

from collections.abc import Mapping
from typing import Any, Final

from providers.tool_runtime.search_results import (
    SearchOptions,
    clean_line,
    join_passages,
    query_with_domains,
    text_or_empty,
)
from providers.tool_runtime.search_service import SearchRequest, SearchService, ServiceUrl

_MAX_QUERY_CHARS: Final = 400
_MAX_QUERY_WORDS: Final = 50


class Brave(SearchService):
    """Searches with Brave (https://api-dashboard.search.brave.com/app/documentation/web-search).

    Domains are sent as operators within the query, which is truncated to 50 words. Brave answers from its own index, so
    that `live: false` changes nothing.
    """

    class Config(SearchService.Config):
        """`base_url` is the URL of Brave's API."""

        base_url: ServiceUrl = "https://api.search.brave.com/res/v1"

    def build_request(self, query: str, options: SearchOptions) -> SearchRequest:
        query_params = {
            "q": query_with_domains(query, options, _MAX_QUERY_CHARS, _MAX_QUERY_WORDS),
            "count": str(options.max_results),
            "result_filter": "web",
            "text_decorations": "false",
            "extra_snippets": "true",
        }
        headers = {"X-Subscription-Token": self.api_key}
        if options.user_location is not None:
            # Sent as headers: Brave refuses a country parameter for which it has no index.
            location = options.user_location
            fields = {
                "Country": options.country,
                "State-Name": location.region,
                "City": location.city,
                "Timezone": location.timezone,
            }
            headers |= {f"X-Loc-{name}": clean_line(value, 100) for name, value in fields.items() if value}
        return SearchRequest("/web/search", query_params, headers)

    def parse_results(self, response: Any) -> Any:
        """Return the results; a search without results has no `web` part."""
        return response["web"]["results"] if "web" in response else [] if response["type"] == "search" else None

    def parse_passage(self, result: Mapping[str, Any]) -> str:
        extra = join_passages(result.get("extra_snippets"))
        return " … ".join(text for text in (text_or_empty(result.get("description")), extra) if text)
