"""Responses, conversations and their items in the KVStore."""
