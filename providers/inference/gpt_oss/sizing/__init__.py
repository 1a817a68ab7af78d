"""Arithmetic on sizes: the memory that a model and its KV pages need, and the machines it fits."""
