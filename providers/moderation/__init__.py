"""Providers of Moderation."""
