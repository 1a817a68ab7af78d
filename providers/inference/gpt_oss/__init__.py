"""gpt-oss on an engine of our own: pages, prefixes, a scheduler, one thread, and torch to compute with."""
