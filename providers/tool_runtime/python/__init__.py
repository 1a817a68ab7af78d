"""Programs of a model in a sandbox on this machine."""
