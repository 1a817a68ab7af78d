"""The interfaces of models that make media: images."""
