"""Stored state: scans that survive damaged records, conditional changes, contents in chunks."""
