"""The command `stack bench`: load on a running server through its public API, and the figures of it. Nothing here is
imported by a server."""
