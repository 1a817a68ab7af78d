"""GGUF models on llama.cpp, in a child process of the server."""
