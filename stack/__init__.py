"""The command line, the run config, the wiring of providers, and the HTTP edge."""

import sys

__version__ = "0.1.0"

# Of the openai package only the types are used; this part of its client would import aiohttp, a tenth of a cold start.
# None stands for a module that is not there, which the package is prepared for.
sys.modules.setdefault("openai._vendor.httpx_aiohttp", None)  # type: ignore[arg-type]  # as the import system has it
