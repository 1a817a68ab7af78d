"""gpt-oss computed by Triton kernels on a GPU."""
