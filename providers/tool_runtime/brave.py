"""Brave: web search through the API of Brave Search, as one tool named `search`."""

from collections.abc import Mapping
from typing import Any, Final

from providers.tool_runtime.search_results import SearchOptions, clean, query_with_domains, text_of, texts_of
from providers.tool_runtime.search_service import Asked, SearchService, ServiceUrl

_MAX_QUERY_CHARS: Final = 400
_MAX_QUERY_WORDS: Final = 50


class Brave(SearchService):
    """Searches with Brave (https://api-dashboard.search.brave.com/app/documentation/web-search).

    Domains go into the query as operators, of which a query holds 50 words. Brave answers out of its own index, so that
    `live: false` changes nothing. A longer query than Brave takes is cut.
    """

    class Config(SearchService.Config):
        """`base_url` is Brave's own."""

        base_url: ServiceUrl = "https://api.search.brave.com/res/v1"

    def ask(self, query: str, options: SearchOptions) -> Asked:
        asked = {
            "q": query_with_domains(query, options, _MAX_QUERY_CHARS, _MAX_QUERY_WORDS),
            "count": str(options.max_results),
            "result_filter": "web",
            "text_decorations": "false",
            "extra_snippets": "true",
        }
        headers = {"X-Subscription-Token": self.key}
        if options.user_location is not None:
            # As headers, because a country that Brave has no index of would be refused as a parameter.
            where = options.user_location
            told = {
                "Country": options.country,
                "State-Name": where.region,
                "City": where.city,
                "Timezone": where.timezone,
            }
            headers |= {f"X-Loc-{name}": clean(value, 100) for name, value in told.items() if value}
        return Asked("/web/search", asked, headers)

    def results(self, answer: Any) -> Any:
        """What was searched for without success has no `web` part."""
        return answer["web"]["results"] if "web" in answer else [] if answer["type"] == "search" else None

    def passage(self, result: Mapping[str, Any]) -> str:
        extra = texts_of(result.get("extra_snippets"))
        return " … ".join(text for text in (text_of(result.get("description")), extra) if text)
