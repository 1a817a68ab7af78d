"""Providers of Files."""
