"""gpt-oss computed by plain torch, on a CPU or a GPU."""
