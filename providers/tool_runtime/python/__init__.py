"""The tool `python`: programs of a model in a sandbox on this machine."""
