"""How much memory a model and its KV pages need, and what fits."""
