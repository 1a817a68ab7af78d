"""The two wire forms of decisions: OpenAI's Decisions API, and the System One API of other servers."""
