"""Webhooks: the queue of events and their delivery, the receivers of the run config and those that tenants manage."""
