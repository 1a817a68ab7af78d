"""gpt-oss checkpoints: their files, tensors and MXFP4 blocks."""
