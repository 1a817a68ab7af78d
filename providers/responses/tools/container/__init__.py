"""The container of a request's calls, which the code interpreter and the shell use."""
