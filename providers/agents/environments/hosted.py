"""HostedEnvironments: the environments of tenants, and the workspaces in which their commands run."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Final

from apis.agents.environments import (
    CreateEnvironment,
    CreateEnvironmentFile,
    EnvironmentFileListParams,
    EnvironmentListParams,
    HostedConfiguration,
    HostedEnvironment,
    NewEnvironment,
    NoEnvironment,
)
from apis.agents.sessions import RequestKey, SessionEnvironment
from apis.errors import AgentNotFound, Conflict, InvalidRequest, NotFound, StackError, StorageCorrupt, Unsupported
from apis.storage.keys import new_id_key
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, delete_all, encode_record
from apis.vaults.vaults import Vaults, check_vaults
from apis.webhooks import Webhooks
from apis.workspaces import WORKSPACE_FOLDER, WORKSPACE_PREFIX, WorkspaceContents, Workspaces
from providers.agents.environments.artifacts import SessionArtifacts
from providers.agents.environments.records import (
    ENDED,
    ID_PREFIX,
    LIVE,
    EnvironmentRecord,
    EnvironmentRef,
    Json,
    move_due,
    show_environment,
)
from providers.agents.environments.secrets import WorkspaceSecrets
from providers.agents.environments.specs import SpecReader, check_path, decode_data, parse_configuration
from providers.agents.environments.store import EnvironmentChange, EnvironmentStore, environment_not_found
from providers.agents.environments.templates import StoredTemplates
from providers.agents.records import SessionRef
from providers.agents.sealed_store import SealedStore
from providers.agents.store import SessionStore, keep_request
from providers.agents.transition import Transition
from providers.common.state.scan import read_page, scan_records

_log = logging.getLogger(__name__)
_RESTORED_NOTICE: Final = "the container was replaced; its files are as they were at the end of the last response"
_MAX_ADDED: Final = 200
"""Files that clients may put into an environment until it is saved."""
_MAX_ENVIRONMENTS: Final = 1000
"""Environments of one tenant that have no session."""


class HostedEnvironments:
    """The environments of one store. A workspace is suspended `idle_s` after its last turn."""

    def __init__(
        self,
        sessions: SessionStore,
        webhooks: Webhooks,
        workspaces: Workspaces,
        vaults: Vaults | None,
        idle_s: float,
        wake: Callable[[], None],
    ) -> None:
        """Configurations are encrypted where there are `vaults`, whose secrets sessions may have. `wake` has a worker
        look for environments that have something to do."""
        self.store = EnvironmentStore(sessions, webhooks)
        self.kv: KVStore = sessions.kv
        self.workspaces = workspaces
        self.specs = SpecReader(workspaces, math.ceil(idle_s / 60) + 1)
        self._vaults = vaults
        self._secrets = WorkspaceSecrets(workspaces, self.specs, vaults)
        self._sealed = SealedStore(self.kv, vaults)
        self.templates = StoredTemplates(self.kv, self.specs, self._sealed)
        self.artifacts = SessionArtifacts(sessions, workspaces)
        self.idle_s = idle_s
        self.wake = wake
        workspaces.restore_with(self.restore)

    async def prepare(self, request: NewEnvironment, *, tenant: str) -> tuple[Json, Json]:
        """Return the stored and the visible fields of a new environment. Raises InvalidRequest, NotFound and
        Unsupported, which name the field."""
        try:
            return await self.specs.prepare(await self.templates.apply(request, tenant=tenant), tenant=tenant)
        except (InvalidRequest, NotFound, Unsupported) as exc:
            exc.param = f"environment.{exc.param}" if exc.param else "environment"
            raise

    async def check(self, environment: SessionEnvironment, *, tenant: str) -> None:
        """Raise the error of an environment that no session could have now."""
        if isinstance(environment, NoEnvironment):
            return
        if environment.environment_id is not None:
            await self.get(environment.environment_id, tenant=tenant)
        else:
            await self.prepare(environment, tenant=tenant)

    def begin(self, session: Transition, spec: Json, visible: Json) -> list[Op]:
        """Begin a session with an environment of its own, and return the operations that create that one."""
        ref = EnvironmentRef(session.ref.tenant, new_environment_id())
        session.record.environment_id, session.record.environment = ref.id, visible
        session.begin_session()
        return self.build_ops(ref, spec, visible, session)

    def build_ops(
        self, ref: EnvironmentRef, spec: Json, visible: Json, session: Transition | None, vault_ids: Sequence[str] = ()
    ) -> list[Op]:
        """Return the operations that create an environment, for a session that is created with it."""
        now = time.time()
        record = EnvironmentRecord(
            visible=visible, created_at=int(now), vault_ids=[*vault_ids], used_at=now, due_at=now
        )
        ops: list[Op] = []
        if session is None:
            ops.append(Put(ref.unattached_key, b""))
        else:
            record.session_id = session.ref.id
        EnvironmentChange(ref, record, session).set_status("pending")
        ops += [*move_due(ref, record), *self._sealed.build_put(ref.spec_key, spec, ABSENT)]
        return [Put(ref.key, encode_record(record), None, ABSENT), *ops]

    async def attach(self, environment: HostedEnvironment, session: Transition) -> list[Op]:
        """Begin a session with an environment that has none, and return the operations that give it to the session.
        Raises NotFound, and Conflict where it has one."""
        ref = EnvironmentRef.parse(session.ref.tenant, environment.environment_id or "")
        entry = await self.kv.get(ref.key)
        if entry is None:
            raise environment_not_found("environment.environment_id")
        record = decode_record(entry, EnvironmentRecord)
        if record.session_id or record.status in ENDED:
            why = "belongs to another session" if record.session_id else f"is {record.status}"
            raise Conflict(f"The environment {why}.", param="environment.environment_id")
        record.session_id, record.used_at = session.ref.id, time.time()
        session.record.environment_id, session.record.environment = ref.id, record.visible
        session.begin_session()
        EnvironmentChange(ref, record, session).set_status(record.status)
        return [Put(ref.key, encode_record(record), None, entry.version), Delete(ref.unattached_key)]

    async def create(self, request: CreateEnvironment, *, tenant: str, key: RequestKey | None = None) -> Json:
        """Create an environment without a session, which begins to be prepared now; one that was created under the key
        before is returned. Raises InvalidRequest for a tenant that has as many as it may, and AgentNotFound for an
        unknown vault."""
        await check_vaults(self._vaults, request.vault_ids, tenant=tenant)
        await self.kv.require_room(tenant)
        if environment_id := await self.store.sessions.find_keyed(tenant, key):
            return await self.get(environment_id, tenant=tenant)
        rows = await self.kv.scan(EnvironmentRef(tenant, "").unattached_key, limit=_MAX_ENVIRONMENTS)
        if len(rows) >= _MAX_ENVIRONMENTS:
            raise InvalidRequest(f"A project has at most {_MAX_ENVIRONMENTS} environments without a session.")
        spec, visible = await self.prepare(request.environment, tenant=tenant)
        ref = EnvironmentRef(tenant, new_environment_id())
        ops = self.build_ops(ref, spec, visible, None, request.vault_ids or ())
        if await self.kv.write([*ops, *keep_request(tenant, key, ref.id)]) is None:
            return await self.create(request, tenant=tenant, key=key)
        self.wake()
        return show_environment(ref, await self.store.load(ref))

    async def get(self, environment_id: str, *, tenant: str) -> Json:
        """Return the environment. Raises AgentNotFound."""
        ref = EnvironmentRef.parse(tenant, environment_id)
        return show_environment(ref, await self.store.load(ref))

    async def list(self, params: EnvironmentListParams, *, tenant: str) -> Page[Json]:
        """Return a page of environments. Raises AgentNotFound for an unknown cursor."""

        def show(environment_id: str, record: EnvironmentRecord) -> Json:
            return show_environment(EnvironmentRef(tenant, environment_id), record)

        prefix = EnvironmentRef(tenant, "").key
        return await read_page(self.kv, prefix, EnvironmentRecord, params, environment_not_found("after"), show)

    async def require_connected(self, session: Transition) -> str:
        """Return "" if the environment of a session is connected, with the secrets that its vaults have now; else have
        a worker connect it, and leave the turn to that one. Return why the turn cannot go on where it never will."""
        ref = self._ref_of(session)
        try:
            record = await self.store.load(ref)
        except AgentNotFound:
            return "The environment of the session was deleted."
        if record.status == "connected":
            vault_ids = _list_vaults(record, session)
            return await self._secrets.refresh(ref, vault_ids, lambda: self.load_configuration(ref))
        if record.status in ENDED:
            reason = (record.error or {}).get("message", "")
            return f"The environment of the session is {record.status}. {reason}".strip()

        def want(change: EnvironmentChange) -> bool:
            if change.record.status in ("connected", *ENDED) or change.session is None:
                return False
            now = time.time()
            change.record.is_wanted = True
            change.record.wanted_at = change.record.wanted_at or now
            change.record.due_at = now
            change.session.delete(session.ref.job_key)
            return True

        await self.store.change(ref, want)
        self.wake()
        return WAITS

    async def load_configuration(self, ref: EnvironmentRef) -> HostedConfiguration:
        """Return the configuration of an environment. Raises StorageCorrupt."""
        return parse_configuration(await self._sealed.load(ref.spec_key))

    async def restore_workspace(self, ref: EnvironmentRef, record: EnvironmentRecord, *, is_lossy: bool) -> bool:
        """Make the workspace of an environment again, as it was saved, with the files that were added since then.
        Return False where there is one."""
        configuration = await self.load_configuration(ref)
        keys = [ref.checkpoint_key, *map(ref.added_key, record.added)]
        checkpoint, *added = await self.kv.get_many(keys)
        if (checkpoint is None and record.has_checkpoint) or None in added:
            raise StorageCorrupt
        files: list[tuple[str, bytes]] = []
        if checkpoint is None:
            files += await self.specs.read_files(configuration, tenant=ref.tenant)
        for entry in added:
            path, _, data = entry.value.partition(b"\0") if entry is not None else (b"", b"", b"")
            files.append((path.decode(), data))
        contents = WorkspaceContents(
            checkpoint.value if checkpoint is not None else b"", files, _RESTORED_NOTICE if is_lossy else ""
        )
        request = self.specs.build_request(ref.id, configuration)
        vault_ids = _list_vaults(record, await self.store.load_session(ref, record))
        try:
            policy = await self._secrets.add(request.network_policy, request.variables, vault_ids, tenant=ref.tenant)
            request = replace(request, network_policy=policy)
        except InvalidRequest as exc:
            if record.status == "pending":
                raise
            _log.warning("a workspace has no secrets of vaults: %s", exc.message)  # the next turn fails for that
        return await self.workspaces.create(ref.workspace_id, request, contents, tenant=ref.tenant)

    async def restore(self, tenant: str, workspace_id: str) -> bool:
        """Restore the workspace of an environment that is used while it is gone; return False for any other id."""
        if not workspace_id.startswith(WORKSPACE_PREFIX):
            return False
        ref = EnvironmentRef.parse(tenant, f"{ID_PREFIX}{workspace_id.removeprefix(WORKSPACE_PREFIX)}")
        try:
            record = await self.store.load(ref)
        except AgentNotFound:
            return False
        if record.status not in LIVE and record.status != "suspended":
            return False
        session = await self.store.load_session(ref, record)
        turn = session.state.turn if session is not None else None
        is_lossy = turn is not None and turn.has_commands
        if await self.restore_workspace(ref, record, is_lossy=is_lossy):
            _log.info("the workspace of an environment was restored")
            try:
                await self.store.change(ref, lambda change: note_restored(change, self.idle_s))
            except AgentNotFound:  # it was deleted meanwhile
                await self.workspaces.end(workspace_id, tenant=tenant)
                return False
        return True

    async def save(self, session: Transition) -> None:
        """Save the workspace of a session, whose turn has run commands."""
        ref = self._ref_of(session)
        record = await self.store.load(ref)
        await self.save_workspace(ref, record)

    async def save_workspace(self, ref: EnvironmentRef, record: EnvironmentRecord) -> None:
        """Store an archive of the workspace in place of the one before. One that is too large is not saved."""
        try:
            archive = await self.workspaces.pack(ref.workspace_id, tenant=ref.tenant)
        except InvalidRequest as exc:
            _log.warning("the workspace of an environment is not saved: %s", exc.message)
            return
        saved = set(record.added)

        def note(change: EnvironmentChange) -> bool:
            change.record.has_checkpoint = True
            change.record.added = [number for number in change.record.added if number not in saved]
            change.ops.append(Put(ref.checkpoint_key, archive))
            change.ops += [Delete(ref.added_key(number)) for number in saved]
            return True

        await self.store.change(ref, note)

    async def add_file(self, environment_id: str, request: CreateEnvironmentFile, *, tenant: str) -> Json:
        """Put a file into a live environment. Raises NotFound, InvalidRequest, and Conflict for one that is not
        live."""
        ref = EnvironmentRef.parse(tenant, environment_id)
        await self.require_live(ref)
        await self.kv.require_room(tenant)
        path = check_path(request.path, "path")
        value = request.file_id if request.type == "file_id" else request.data
        if value is None:
            name = "file_id" if request.type == "file_id" else "data"
            raise InvalidRequest(
                f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
            )
        if request.type == "file_id":
            data = await self.specs.read_upload(value, "", tenant=tenant)
        else:
            data = decode_data(value, "data", self.workspaces.max_file_bytes)
        await self.workspaces.write_file(ref.workspace_id, path, data, tenant=tenant)

        def note(change: EnvironmentChange) -> bool:
            record = change.record
            if len(record.added) >= _MAX_ADDED:
                raise Conflict(f"{_MAX_ADDED} files were added since the environment was saved: send a message first.")
            number = record.next_added
            record.next_added += 1
            record.added.append(number)
            record.used_at = time.time()
            change.ops.append(Put(ref.added_key(number), path.encode() + b"\0" + data))
            return True

        await self.store.change(ref, note)
        return _show_file(ref, path, len(data))

    async def list_files(
        self, environment_id: str, params: EnvironmentFileListParams, *, tenant: str
    ) -> tuple[Sequence[Json], str | None]:
        """Return a page of the files of a live environment, and the token of the next one. Raises as `add_file`."""
        ref = EnvironmentRef.parse(tenant, environment_id)
        await self.require_live(ref)
        folder = WORKSPACE_FOLDER if params.path is None else params.path.rstrip("/")
        if folder != WORKSPACE_FOLDER:
            check_folder(folder)
        files = await self.workspaces.list_files(ref.workspace_id, folder, tenant=tenant)
        ordered = sorted(files, key=lambda file: file.path.split("/"), reverse=params.order == "desc")
        if params.page is not None:
            last = params.page.split("/")
            is_later = last.__gt__ if params.order == "desc" else last.__lt__
            ordered = [file for file in ordered if is_later(file.path.split("/"))]
        visible = [_show_file(ref, file.path, file.size_bytes) for file in ordered[: params.limit]]
        return visible, ordered[params.limit - 1].path if len(ordered) > params.limit else None

    async def require_live(self, ref: EnvironmentRef) -> EnvironmentRecord:
        """Return an environment whose workspace can be used. Raises AgentNotFound and Conflict."""
        record = await self.store.load(ref)
        if record.status not in LIVE and record.status != "suspended":
            raise Conflict(f"The environment is {record.status}.", param="environment_id")
        return record

    async def delete_of_session(self, session: SessionRef, environment_id: str) -> None:
        """Delete the environment of a deleted session; without an id, because the session was damaged, it is looked
        for."""
        await self.artifacts.delete_all(session)
        if environment_id:
            await self.delete(EnvironmentRef(session.tenant, environment_id))
            return
        prefix = EnvironmentRef(session.tenant, "").key
        async with aclosing(scan_records(self.kv, prefix, EnvironmentRecord)) as rows:
            environment_ids = [
                row.key.removeprefix(prefix) async for row in rows if row.record.session_id == session.id
            ]
        for name in environment_ids:
            await self.delete(EnvironmentRef(session.tenant, name))

    async def delete_all(self, *, tenant: str) -> None:
        """Delete all environments of a tenant."""
        prefix = EnvironmentRef(tenant, "").key
        while rows := await self.kv.scan(prefix, limit=100):
            for key, _ in rows:
                await self.delete(EnvironmentRef(tenant, key.removeprefix(prefix)))

    async def delete(self, ref: EnvironmentRef) -> None:
        """Delete an environment with all that is stored of it, if there is one."""
        with suppress(StackError):  # one of another machine ends by itself
            await self.workspaces.end(ref.workspace_id, tenant=ref.tenant)
        entry = await self.kv.get(ref.key)
        ops: list[Op] = [Delete(key) for key in (ref.key, ref.checkpoint_key, ref.unattached_key)]
        ops += self._sealed.build_delete(ref.spec_key)
        if entry is not None:
            with suppress(StorageCorrupt):
                if due_key := decode_record(entry, EnvironmentRecord).due_key:
                    ops.append(Delete(due_key))
        await self.kv.write(ops)
        await delete_all(self.kv, ref.added_prefix)
        await self.store.forget_deliveries(ref)

    def _ref_of(self, session: Transition) -> EnvironmentRef:
        return EnvironmentRef(session.ref.tenant, session.record.environment_id)


WAITS: Final = "waits"
"""The answer for an environment that a worker has to connect first."""


def build_shell_tool(session: Transition) -> Json:
    """Return the declaration of the shell in the workspace of a session."""
    ref = EnvironmentRef(session.ref.tenant, session.record.environment_id)
    return {"type": "shell", "environment": {"type": "container_reference", "container_id": ref.workspace_id}}


def _list_vaults(record: EnvironmentRecord, session: Transition | None) -> list[str]:
    """Return the vaults whose variables an environment has: of two with one name, the one of the session counts."""
    of_session = session.record.vault_ids if session is not None else ()
    return [*dict.fromkeys([*of_session, *record.vault_ids])]


def new_environment_id() -> str:
    """Return a new id of an environment."""
    return f"{ID_PREFIX}{new_id_key()}"


def note_restored(change: EnvironmentChange, idle_s: float) -> bool:
    """Note that the workspace of an environment was gone and is there again, and what is lost of it."""
    record, session = change.record, change.session
    turn = session.state.turn if session is not None else None
    if record.status == "suspended":
        change.set_status("ready")
        record.is_ending = False
        record.due_at = time.time() + idle_s
    elif record.status == "connected":
        change.set_status("disconnected")
        if session is not None and turn is not None and turn.has_commands:
            change.reset()
        change.set_status("connected")
    else:
        return False
    return True


def check_folder(path: str) -> None:
    """Raise InvalidRequest for a path that is no folder of a workspace."""
    try:
        check_path(f"{path}/a", "path")
    except InvalidRequest as exc:
        raise InvalidRequest(f"A folder lies below {WORKSPACE_FOLDER}.", param="path", code=exc.code) from None


def _show_file(ref: EnvironmentRef, path: str, size_bytes: int) -> Json:
    return {
        "object": "agent.environment.file",
        "environment_id": ref.id,
        "path": path,
        "size_bytes": size_bytes,
    }
