"""Background responses: queue, workers, event log."""
