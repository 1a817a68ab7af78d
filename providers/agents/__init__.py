"""Agents, and sessions whose turns are background responses in a conversation.

A turn is a row of responses: the first one reads the user's messages, and each of the others the results of functions,
the answers to approvals, or further messages. Between two of them a turn may wait for days: then there are records, and
no task, lease or worker.

Objects are JSON with the fields of the SDK's types. Those types are not loaded: they would take 16 MiB in each server.
"""
