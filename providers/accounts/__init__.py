"""Providers of Accounts: the keys of the run config, keys in the KVStore, and several of these as one."""
