"""Providers of ImageGenerator."""
