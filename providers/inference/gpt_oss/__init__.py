"""gpt-oss on the stack's own engine: KV pages, shared prefixes, a scheduler, one thread, and torch or Triton to
compute."""
