"""The built-in page: static ES modules without a build step, and the ASGI layer that serves them."""
