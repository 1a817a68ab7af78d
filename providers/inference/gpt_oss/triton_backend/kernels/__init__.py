"""The engine's kernels: one kernel and its launch function per file. Tests have a torch reference of each."""
