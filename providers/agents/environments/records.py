"""The records of environments in the KVStore, and their keys.

    TENANT/agent_environment/ID              the environment, and what is public of it
    TENANT/agent_environment_spec/ID         its configuration, with what is confidential
    TENANT/agent_environment_unattached/ID   present as long as it has no session
    TENANT/agent_checkpoint/ID               the archive of its work folder as it was saved last
    TENANT/agent_added/ID/NUMBER             a file that a client has put into it since then: path, NUL, and bytes
    /agent_environment_due/TIME/TENANT/ID    it has something to do from TIME on, in ms of Unix time
    /agent_environment_lease/TENANT/ID       held by the worker that does it

Each change of an environment moves its due row in the same write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from apis.storage.keys import record_id
from apis.storage.kv_store import Op
from apis.workspaces import WORKSPACE_PREFIX
from providers.agents.work import ENVIRONMENT_PREFIX
from providers.common.due_rows import move_due_row

Json = dict[str, Any]
EnvironmentStatus = Literal["pending", "ready", "connected", "disconnected", "suspended", "expired", "failed"]
LIVE: Final = frozenset({"ready", "connected", "disconnected"})
ENDED: Final = frozenset({"expired", "failed"})
ID_PREFIX: Final = "env_"


class EnvironmentRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An environment; `visible` has its fields as a session shows them, and its programs have the variables of the
    vaults `vault_ids`, besides those of its session. `session_id` is empty as long as no session has
    it. A turn waits for an environment that `is_wanted`, since `wanted_at`. One that is suspended and `is_ending` has a
    workspace that is still to be ended. `added` are the numbers of the files that clients have put into it since it was
    saved."""

    visible: Json
    created_at: int
    vault_ids: list[str] = []
    status: EnvironmentStatus = "pending"
    session_id: str = ""
    error: Json | None = None
    is_wanted: bool = False
    wanted_at: float = 0.0
    is_ending: bool = False
    has_checkpoint: bool = False
    added: list[int] = []
    next_added: int = 0
    reset_count: int = 0
    used_at: float = 0.0
    due_at: float | None = None
    due_key: str = ""


@dataclass(frozen=True, slots=True)
class EnvironmentRef:
    """The tenant and id of an environment, and the keys of its records."""

    tenant: str
    id: str

    @classmethod
    def parse(cls, tenant: str, environment_id: str) -> "EnvironmentRef":
        """Return the reference of an id that a client has sent."""
        return cls(tenant, record_id(environment_id))

    @property
    def key(self) -> str:
        return f"{self.tenant}/agent_environment/{self.id}"

    @property
    def spec_key(self) -> str:
        return f"{self.tenant}/agent_environment_spec/{self.id}"

    @property
    def unattached_key(self) -> str:
        return f"{self.tenant}/agent_environment_unattached/{self.id}"

    @property
    def checkpoint_key(self) -> str:
        return f"{self.tenant}/agent_checkpoint/{self.id}"

    def added_key(self, number: int) -> str:
        return f"{self.added_prefix}{number:06d}"

    @property
    def added_prefix(self) -> str:
        return f"{self.tenant}/agent_added/{self.id}/"

    @property
    def lease_key(self) -> str:
        return f"/agent_environment_lease/{self.tenant}/{self.id}"

    @property
    def workspace_id(self) -> str:
        """The id of the container that is the workspace of the environment."""
        return f"{WORKSPACE_PREFIX}{self.id.removeprefix(ID_PREFIX)}"


def move_due(ref: EnvironmentRef, record: EnvironmentRecord) -> Sequence[Op]:
    """Return the operations that move the due row of an environment to its present time."""
    key, ops = move_due_row(ENVIRONMENT_PREFIX, ref.tenant, ref.id, record.due_key, record.due_at)
    record.due_key = key
    return ops


def show_state(ref: EnvironmentRef, record: EnvironmentRecord) -> Json:
    """Return the state of an environment as its events have it."""
    return {"id": ref.id, "type": "openai_hosted", "status": record.status, "error": record.error}


def show_environment(ref: EnvironmentRef, record: EnvironmentRecord) -> Json:
    """Return an environment as the API shows it."""
    parts = {name: record.visible[name] for name in ("type", "files", "skills", "plugins")}
    return {"id": ref.id, "object": "agent.environment", "status": record.status, **parts}
