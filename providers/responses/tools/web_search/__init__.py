"""The hosted web search, by functions or by the model's own browser."""
