"""Ways to URLs that came from outside."""
