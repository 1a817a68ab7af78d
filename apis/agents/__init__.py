"""The requests of the Agents API: agents, their sessions, and the events that are sent to a session."""

from typing import Final

MODEL_PREFIX: Final = "agent/"
"""Beginning of the name of a model that is a stored agent; its id follows."""
