"""The tokens of an identity provider (OpenID Connect): its keys, the checks of a token, and claims as rights."""
