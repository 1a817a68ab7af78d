"""Vaults: secrets that a tenant stores once, and that this server sends to the servers which they are for."""
