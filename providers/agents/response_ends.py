"""Ends the responses of turns that have no more use of them, whichever worker drives those."""

from contextlib import suppress

from apis.errors import InvalidRequest, NotFound, Overloaded, StoreUnavailable
from apis.responses import Responses
from providers.agents.transition import Transition


async def end_responses(responses: Responses, session: Transition) -> None:
    """End the responses of a session, and of its subagents that were changed, if their turns are cancelled or have new
    input. Their workers see that with the next event, which may be long in coming."""
    for each in (session, *session.subagents.values()):
        turn, tenant = each.state.turn, each.ref.tenant
        if turn is None or not turn.response_id:
            continue
        if turn.is_cancelling:
            with suppress(NotFound, InvalidRequest):  # it has not begun, or has ended
                await responses.cancel(turn.response_id, tenant=tenant)
        elif each.has_unread_input:
            with suppress(Overloaded, StoreUnavailable):  # the worker of the turn sees the input with the next event
                await responses.end_after_turn(turn.response_id, tenant=tenant)
