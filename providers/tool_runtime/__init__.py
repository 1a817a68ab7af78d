"""What runs tools."""
