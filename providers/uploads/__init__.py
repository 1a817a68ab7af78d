"""Providers of the API Uploads."""
