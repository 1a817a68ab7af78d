"""The interfaces of a stack, and the data that passes through them. No implementation, no I/O."""
