"""Threads and batch sizes of a model on this machine: measured once, stored, and read at later starts."""
