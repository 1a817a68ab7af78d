"""Fetchers: providers that open URLs from outside, bounded and only at checked addresses."""
