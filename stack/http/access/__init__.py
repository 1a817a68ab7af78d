"""What a caller may do and how much: privileges of keys, and limits and usage of requests."""
