"""The engine: sequences, scheduler, KV pages, shared prefixes and one thread. No module here imports torch."""
