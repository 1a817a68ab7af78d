"""Anthropic's Messages API as a codec: its requests become requests for responses, and responses become messages."""
