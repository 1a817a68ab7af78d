"""Confinement of untrusted programs and of parsers of untrusted files: filters of system calls, commands that start a
program in bubblewrap, and shell commands that run in one. Shared here, because two rooms of providers run such
programs; it starts none itself."""
