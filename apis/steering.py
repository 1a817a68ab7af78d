"""Steering: input that is sent to a response while it runs, which another response reads that follows it by itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Steer:
    """Steering input that is stored: its id, the response that it was sent to, and the id of the response that will
    follow that one with it. All inputs that are sent to one response have one successor."""

    id: str
    previous_response_id: str
    successor_id: str
