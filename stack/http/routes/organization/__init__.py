"""Routes below /v1/organization: projects, service accounts and keys, as OpenAI's administration API has them."""
