"""Providers of language and embedding models: local engines, clients of remote servers, and a router over them."""
