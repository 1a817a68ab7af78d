"""The engine: sequences, the scheduler, KV pages, shared prefixes, one thread. It imports no torch."""
