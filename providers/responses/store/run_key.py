"""The key of a background response's run, by which a response that has not ended is known."""


def run_key(tenant: str, response_id: str) -> str:
    """Return the key of the record that exists until the response has ended."""
    return f"/run/{tenant}/{response_id}"
