"""The ledger: requests admitted under limits, and usage counted, in the store that all processes share."""
