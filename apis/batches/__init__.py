"""Batches of requests, executed when there is time."""
