"""Deletion of what projects have stored: all of an archived project, or what is older than its retention."""
