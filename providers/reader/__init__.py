"""Readers: providers that turn files and pages from outside into text."""
