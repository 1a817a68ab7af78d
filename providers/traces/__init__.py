"""Traces that agents record about their own runs."""
