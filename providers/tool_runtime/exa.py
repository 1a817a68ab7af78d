"""Exa: the `search` tool over Exa's API."""

from collections.abc import Mapping
from typing import Any

from providers.tool_runtime.search_results import SearchOptions, join_passages, text_or_empty
from providers.tool_runtime.search_service import SearchRequest, SearchService, ServiceUrl


class Exa(SearchService):
    """Searches with Exa (https://exa.ai/docs/reference/search).

    Exa uses only the `country` of `user_location`; with `live: false` it returns pages of its cache only.
    """

    class Config(SearchService.Config):
        """`base_url` is the URL of Exa's API."""

        base_url: ServiceUrl = "https://api.exa.ai"

    def build_request(self, query: str, options: SearchOptions) -> SearchRequest:
        """Request passages only, because Exa bills whole texts by the page, and passages fit the query."""
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
