"""The shells: on the client's machine, and in a container of this server."""
