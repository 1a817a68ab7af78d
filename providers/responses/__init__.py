"""The Responses API as a loop of chat completions and tool calls."""
