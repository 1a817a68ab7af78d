"""SearXNG: the `search` tool over a self-hosted SearXNG instance."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from apis.errors import ToolFailed
from providers.tool_runtime.search_results import SearchOptions, query_with_domains, text_or_empty
from providers.tool_runtime.search_service import SearchRequest, SearchService, ServiceUrl

_MAX_QUERY_CHARS: Final = 1024
_MAX_QUERY_WORDS: Final = 50


class SearXNG(SearchService):
    """Searches with SearXNG (https://docs.searxng.org/dev/search_api.html), whose settings must list the format json.

    Domains are sent as operators within the query, for the engines that it queries. It ignores `user_location`. It
    queries live engines, so that `live: false` is refused. It needs no key; `api_key` is sent as a bearer token.
    """

    needs_key = False
    status_texts: ClassVar[Mapping[int, str]] = {
        403: "The search service does not give JSON: its settings must list json among search.formats."
    }

    class Config(SearchService.Config):
        """`base_url` is the URL of the instance; `language` is one of SearXNG's (`all`, `de`, `de-CH`)."""

        base_url: ServiceUrl = "http://127.0.0.1:8080"
        language: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._language = config.language

    def build_request(self, query: str, options: SearchOptions) -> SearchRequest:
        if options.live is False:
            raise ToolFailed("This search service asks live search engines only, which this request does not allow.")
        query_params = {"q": query_with_domains(query, options, _MAX_QUERY_CHARS, _MAX_QUERY_WORDS), "format": "json"}
        if self._language:
            query_params["language"] = self._language
        return SearchRequest(
            "/search", query_params, {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        )

    def parse_results(self, response: Any) -> Any:
        return response["results"]

    def parse_passage(self, result: Mapping[str, Any]) -> str:
        return text_or_empty(result.get("content"))
