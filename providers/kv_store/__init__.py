"""Providers of KVStore."""
