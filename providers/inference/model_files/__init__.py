"""Files of GGUF models, for every engine and for `stack models`: which there are, where they come from, what they need, and if this machine can run them."""
