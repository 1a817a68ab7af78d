"""Webhook endpoints that tenants create while the server runs; the run config may name further ones."""
