"""Chat models: local engines, remote servers, and what is made of several."""
