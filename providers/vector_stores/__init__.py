"""Providers of VectorStores."""
