"""The incoming JSON of the Responses API as small strict models: items, their parts, tools and choices."""
