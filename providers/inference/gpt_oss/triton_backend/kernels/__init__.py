"""The engine's kernels: per file one kernel, its launch function and its torch reference of the same signature."""
