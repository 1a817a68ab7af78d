"""Grammars and schemas from outside: checked in a child process before any engine of this process builds them."""
