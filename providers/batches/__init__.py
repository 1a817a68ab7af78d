"""Providers of the API Batches: records of batches, validation, blocks of lines, and their workers."""
