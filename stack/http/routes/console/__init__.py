"""Extensions of OpenAI's API below /v1/stack, which the page shows: the overview, models to fetch, MCP servers."""
