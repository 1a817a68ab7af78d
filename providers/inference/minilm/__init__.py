"""all-MiniLM-L6-v2 for embeddings, in a child process of the server."""
