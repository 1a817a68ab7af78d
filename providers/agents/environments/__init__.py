"""Environments of sessions: workspaces that are made, saved, suspended and restored.

pending -> ready -> connected <-> disconnected; suspended after a time without a turn, and expired after a long one; or
failed. A workspace is saved at the end of each response that has run commands, so that a lost one is restored as of
then.
"""

from providers.agents.environments.hosted import HostedEnvironments
from providers.agents.environments.queue import EnvironmentQueue, QueueTimes

__all__ = ["EnvironmentQueue", "HostedEnvironments", "QueueTimes"]
