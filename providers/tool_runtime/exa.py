"""Exa: web search through Exa's API, as one tool named `search`."""

from collections.abc import Mapping
from typing import Any

from providers.tool_runtime.search_results import SearchOptions, join_passages, text_or_empty
from providers.tool_runtime.search_service import SearchRequest, SearchService, ServiceUrl


class Exa(SearchService):
    """Searches with Exa (https://exa.ai/docs/reference/search).

    Of `user_location` Exa knows the `country` only; with `live: false` it gives pages of its own cache only.
    """

    class Config(SearchService.Config):
        """`base_url` is Exa's own."""

        base_url: ServiceUrl = "https://api.exa.ai"

    def build_request(self, query: str, options: SearchOptions) -> SearchRequest:
        """Passages only, no whole texts: Exa bills each view of a page, and passages fit the query."""
        contents: dict[str, Any] = {"highlights": {"maxCharacters": options.max_passage_chars}}
        if options.live is False:
            contents["maxAgeHours"] = -1
        body: dict[str, Any] = {"query": query, "type": "auto", "numResults": options.max_results, "contents": contents}
        if options.allowed_domains:
            body["includeDomains"] = options.allowed_domains
        if options.blocked_domains:
            body["excludeDomains"] = options.blocked_domains
        if options.country:
            body["userLocation"] = options.country
        return SearchRequest("/search", headers={"x-api-key": self.api_key}, body=body)

    def parse_results(self, response: Any) -> Any:
        return response["results"]

    def parse_passage(self, result: Mapping[str, Any]) -> str:
        return (
            join_passages(result.get("highlights"))
            or text_or_empty(result.get("summary"))
            or text_or_empty(result.get("text"))
        )
