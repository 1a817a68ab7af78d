"""Vaults whose secrets are encrypted under keys of the run config."""
