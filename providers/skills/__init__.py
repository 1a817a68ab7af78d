"""Skills of tenants, and the ZIP archives that they come in."""
