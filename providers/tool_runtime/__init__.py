"""Tools that the server runs: search services, a browser, a Python sandbox."""
