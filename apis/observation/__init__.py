"""What operators and the built-in page see of a stack while it works: background responses, and agents' own traces."""
