"""Connections to servers elsewhere: the hosts of a url, of which one is used."""
