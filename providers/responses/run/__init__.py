"""One response in progress: its turns, the items they open, its checkpoint and its end."""
