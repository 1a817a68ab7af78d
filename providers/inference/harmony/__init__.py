"""Harmony, the format gpt-oss was trained on: requests to tokens, tokens to deltas, grammars."""
