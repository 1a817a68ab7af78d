"""Clients of OpenAI's chat completions and embeddings, as inference servers offer them."""
