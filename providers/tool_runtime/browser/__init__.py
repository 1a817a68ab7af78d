"""The browser tool: web pages, fetched by the Fetcher and turned into text by the Reader."""
