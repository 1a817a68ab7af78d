"""The audit log: who changed projects, keys and their limits, when and from where. Records are never changed."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from apis.accounts.requests import AccountPage

AuditEvent = Literal[
    "api_key.created",
    "api_key.updated",
    "api_key.deleted",
    "service_account.created",
    "service_account.updated",
    "service_account.deleted",
    "project.created",
    "project.updated",
    "project.archived",
    "project.deleted",
    "organization.updated",
    "rate_limit.updated",
]
"""The acts that are recorded, by the names of OpenAI's audit log."""


@dataclass(frozen=True, slots=True)
class AuditActor:
    """The one who acts: an administrator's key, or a person at the command line for `session`.

    `id` is that of the key or of the person; empty for a key of the run config. `ip_address` is that of the client's
    connection, empty at the command line.
    """

    type: Literal["api_key", "session"] = "session"
    id: str = ""
    ip_address: str = ""


SERVER_ACTOR: Final = AuditActor("session", "server")
"""Actor of what the server does by itself."""
CURRENT_ACTOR: Final[ContextVar[AuditActor]] = ContextVar("audit_actor", default=SERVER_ACTOR)
"""The actor of the running task, set by what receives its request: every record names it."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One act. `details` are those that OpenAI's objects have for its type, and never hold the text of a key."""

    id: str
    type: AuditEvent
    effective_at: int
    actor: AuditActor
    project_id: str | None = None
    project_name: str | None = None
    resource_ids: tuple[str, ...] = ()
    """The ids of the objects that the act was performed on."""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


class EffectiveAt(BaseModel):
    """Bounds of the time of an act, in seconds of Unix time."""

    gt: int | None = Field(default=None, ge=0, le=2**40)
    gte: int | None = Field(default=None, ge=0, le=2**40)
    lt: int | None = Field(default=None, ge=0, le=2**40)
    lte: int | None = Field(default=None, ge=0, le=2**40)

    @property
    def first(self) -> int:
        """The first second that the bounds admit."""
        return max(self.gte or 0, 0 if self.gt is None else self.gt + 1)

    @property
    def end(self) -> int | None:
        """The first second after those that the bounds admit; None without such a bound."""
        ends = [end for end in (self.lt, None if self.lte is None else self.lte + 1) if end is not None]
        return min(ends) if ends else None


class AuditLogQuery(AccountPage):
    """Query of the audit log, newest first; every filter that is set has to admit a record."""

    before: str | None = Field(default=None, max_length=256)
    effective_at: EffectiveAt = EffectiveAt()
    project_ids: list[str] = Field(default=[], max_length=1000)
    event_types: list[str] = Field(default=[], max_length=1000)
    actor_ids: list[str] = Field(default=[], max_length=1000)
    actor_emails: list[str] = Field(default=[], max_length=1000)
    resource_ids: list[str] = Field(default=[], max_length=1000)
    tenant_only: bool = False

    def admits(self, record: AuditRecord) -> bool:
        """Return true if the filters admit the record. Actors here have no e-mail address, and no act belongs to
        OpenAI's own tenants."""
        end = self.effective_at.end
        return (
            not (self.tenant_only or self.actor_emails)
            and self.effective_at.first <= record.effective_at
            and (end is None or record.effective_at < end)
            and (not self.project_ids or record.project_id in self.project_ids)
            and (not self.event_types or record.type in self.event_types)
            and (not self.actor_ids or record.actor.id in self.actor_ids)
            and (not self.resource_ids or not set(self.resource_ids).isdisjoint(record.resource_ids))
        )
