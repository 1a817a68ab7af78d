"""Subagents: helpers of a session's agent, each with a conversation of its own.

A subagent is a session below its session, driven by the same queue. The agent creates and directs it with functions
that the worker of its turn answers. What a call changes is written in the step that answers it, so that no call has its
effect twice. An agent that waits for subagents needs no worker: the end of a subagent's turn wakes it.
"""
