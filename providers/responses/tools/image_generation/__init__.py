"""The hosted tool `image_generation`, over the stack's ImageGenerator."""
