"""The command `stack doctor`: what works on a running stack, or on this machine, and the remedy for what does not."""
