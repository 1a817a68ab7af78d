"""Accounts of those who send requests: the interface that checks a key, the directory of projects and keys, scopes."""
