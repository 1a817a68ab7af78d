"""Files of GGUF models: which there are, where they come from, what they need, and if this machine can run them. Every
engine may use it, and `stack models`."""
