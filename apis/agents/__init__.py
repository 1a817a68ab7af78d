"""The requests of the Agents API: agents, their sessions, and the events that are sent to a session."""
