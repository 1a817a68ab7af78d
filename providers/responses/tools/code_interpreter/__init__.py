"""The hosted code interpreter."""
