"""What a stack can do: the interfaces, and the data that passes through them. No implementation, no I/O."""
