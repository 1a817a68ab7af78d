"""SearXNG: web search through a SearXNG instance of one's own, as one tool named `search`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from apis.errors import ToolFailed
from providers.tool_runtime.search_results import SearchOptions, query_with_domains, text_or_empty
from providers.tool_runtime.search_service import SearchRequest, SearchService, ServiceUrl

_MAX_QUERY_CHARS: Final = 1024
_MAX_QUERY_WORDS: Final = 50


class SearXNG(SearchService):
    """Searches with SearXNG (https://docs.searxng.org/dev/search_api.html), whose settings must list the format json.

    Domains go into the query as operators, for the engines behind it. It knows no `user_location`. It asks live
    engines, so that `live: false` is refused. It needs no key; one that is given goes along as a bearer token.
    """

    needs_key = False
    status_texts: ClassVar[Mapping[int, str]] = {
        403: "The search service does not give JSON: its settings must list json among search.formats."
    }

    class Config(SearchService.Config):
        """`base_url` is the instance's own; `language` is one of SearXNG's (`all`, `de`, `de-CH`)."""

        base_url: ServiceUrl = "http://127.0.0.1:8080"
        language: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._language = config.language

    def build_request(self, query: str, options: SearchOptions) -> SearchRequest:
        if options.live is False:
            raise ToolFailed("This search service asks live search engines only, which this request does not allow.")
        asked = {"q": query_with_domains(query, options, _MAX_QUERY_CHARS, _MAX_QUERY_WORDS), "format": "json"}
        if self._language:
            asked["language"] = self._language
        return SearchRequest("/search", asked, {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})

    def parse_results(self, response: Any) -> Any:
        return response["results"]

    def parse_passage(self, result: Mapping[str, Any]) -> str:
        return text_or_empty(result.get("content"))
