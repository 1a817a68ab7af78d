"""Confinement of untrusted programs and of parsers of untrusted files: filters of system calls, and commands that start
a program in bubblewrap. Shared here, because two rooms of providers run such programs; it starts none itself."""
