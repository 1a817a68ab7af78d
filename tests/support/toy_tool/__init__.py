"""A hosted tool that the product does not have, of a type that the SDK knows: two files of the product that a test adds
to a copy of it."""
