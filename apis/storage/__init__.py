"""The shared state of all workers: the KVStore interface, and leases, records, keys and pages over it."""
