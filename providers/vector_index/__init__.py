"""Providers of VectorIndex."""
