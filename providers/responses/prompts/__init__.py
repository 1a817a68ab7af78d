"""Prompts: the templates of the run config that requests refer to by id, and their rendering into requests."""
