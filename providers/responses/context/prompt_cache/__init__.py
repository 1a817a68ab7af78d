"""Prompt caches: the root by which a chain stays with one replica, and comparisons of prompts."""
