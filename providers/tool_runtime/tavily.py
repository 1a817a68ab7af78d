"""Tavily: the `search` tool over Tavily's API."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from apis.errors import ToolFailed
from providers.tool_runtime.search_results import SearchOptions, text_or_empty
from providers.tool_runtime.search_service import SearchRequest, SearchService, ServiceUrl

_MAX_QUERY_CHARS: Final = 400
_COUNTRIES: Final[Mapping[str | None, str]] = {
    "AE": "united arab emirates",
    "AR": "argentina",
    "AT": "austria",
    "AU": "australia",
    "BE": "belgium",
    "BG": "bulgaria",
    "BR": "brazil",
    "CA": "canada",
    "CH": "switzerland",
    "CL": "chile",
    "CN": "china",
    "CO": "colombia",
    "CZ": "czech republic",
    "DE": "germany",
    "DK": "denmark",
    "EG": "egypt",
    "ES": "spain",
    "FI": "finland",
    "FR": "france",
    "GB": "united kingdom",
    "GR": "greece",
    "HR": "croatia",
    "HU": "hungary",
    "ID": "indonesia",
    "IE": "ireland",
    "IL": "israel",
    "IN": "india",
    "IT": "italy",
    "JP": "japan",
    "KE": "kenya",
    "KR": "south korea",
    "MX": "mexico",
    "MY": "malaysia",
    "NG": "nigeria",
    "NL": "netherlands",
    "NO": "norway",
    "NZ": "new zealand",
    "PE": "peru",
    "PH": "philippines",
    "PK": "pakistan",
    "PL": "poland",
    "PT": "portugal",
    "RO": "romania",
    "RS": "serbia",
    "RU": "russia",
    "SA": "saudi arabia",
    "SE": "sweden",
    "SG": "singapore",
    "SK": "slovakia",
    "TH": "thailand",
    "TR": "turkey",
    "TW": "taiwan",
    "UA": "ukraine",
    "US": "united states",
    "VN": "vietnam",
    "ZA": "south africa",
}
"""Names of the countries that Tavily knows. It only ranks their pages higher, so that an unknown country is omitted."""


class Tavily(SearchService):
    """Searches with Tavily (https://docs.tavily.com/documentation/api-reference/endpoint/search).

    Tavily uses only the `country` of `user_location`. It searches the live web, so that `live: false` is refused. The
    query is truncated to 400 characters.
    """

    status_texts: ClassVar[Mapping[int, str]] = {
        432: "The search service's plan is used up.",
        433: "The search service's spending limit is reached.",
    }

    class Config(SearchService.Config):
        """`base_url` is the URL of Tavily's API."""

        base_url: ServiceUrl = "https://api.tavily.com"

    def build_request(self, query: str, options: SearchOptions) -> SearchRequest:
        if options.live is False:
            raise ToolFailed("This search service searches the live web only, which this request does not allow.")
        body: dict[str, Any] = {
            "query": query[:_MAX_QUERY_CHARS],
            "search_depth": "basic",
            "max_results": options.max_results,
        }
        if options.allowed_domains:
            body["include_domains"] = options.allowed_domains
        if options.blocked_domains:
            body["exclude_domains"] = options.blocked_domains
        if options.country in _COUNTRIES:
            body["country"] = _COUNTRIES[options.country]
        return SearchRequest("/search", headers={"Authorization": f"Bearer {self.api_key}"}, body=body)

    def parse_results(self, response: Any) -> Any:
        return response["results"]

    def parse_passage(self, result: Mapping[str, Any]) -> str:
        return text_or_empty(result.get("content"))
