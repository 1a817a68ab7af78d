"""The bounds of subagents, their ids, and how the API shows them."""

from typing import Final

from apis.storage.keys import new_id_key
from providers.agents.records import Json, SessionRef, StoredSession

MAX_SUBAGENTS: Final = 64
"""Subagents of one session, closed ones included."""
MAX_TEXT_CHARS: Final = 256 * 1024
"""Characters of one message to a subagent."""
MAX_WAITING: Final = 100
"""Messages of one subagent that no model has read yet."""
MAX_REPORT_CHARS: Final = 32 * 1024
"""Characters of a subagent's last message that its agent reads."""
MAX_PREVIEW_CHARS: Final = 4096
"""Characters of a task that are shown with its subagent; its first item has all."""
_ID_PREFIX: Final = "subagent_"


def new_subagent_id() -> str:
    """Return a new id of a subagent."""
    return f"{_ID_PREFIX}{new_id_key()}"


def build_conversation_id(subagent_id: str) -> str:
    """Return the id of the conversation of a subagent, which is known before there is one."""
    return f"conv_{subagent_id.removeprefix(_ID_PREFIX)}"


def show_subagent(ref: SessionRef, record: StoredSession) -> Json:
    """Return a subagent as the API shows it."""
    details = record.subagent
    closed_at = None if details is None else details.closed_at
    return {
        "id": ref.subagent_id,
        "object": "agent.session.subagent",
        "session_id": ref.id,
        "parent_agent_id": record.agent_id,
        "name": None if details is None else details.name,
        "instructions": None if details is None else [{"type": "output_text", "text": details.task}],
        "status": "active" if closed_at is None else "closed",
        "opened_at": record.created_at,
        "closed_at": closed_at,
    }
