"""The command line, the run config, the wiring of providers, and the HTTP edge."""

__version__ = "0.2.0"
