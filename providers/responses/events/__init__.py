"""The typed events and output items that a client sees."""
