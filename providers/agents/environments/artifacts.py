"""SessionArtifacts: copies of the files that lie in /workspace/outputs at the end of a turn, kept through Files.

    TENANT/agent_artifact/SESSION/ID       an artifact
    TENANT/agent_output/SESSION/TURN~HASH  a file that was copied for a turn that has not ended, by a hash of its path

The artifacts of a turn appear in the step that completes it. A worker that ends before leaves copies, which the next
one takes over, or deletes.
"""

import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Final

import msgspec

from apis.agents.environments import ArtifactListParams
from apis.documents.files import CreateFile, Files
from apis.errors import AgentNotFound, InvalidRequest, NotFound
from apis.storage.keys import new_id_key, record_id
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, encode_record
from apis.workspaces import OUTPUTS_FOLDER, Workspaces
from providers.agents.environments.records import EnvironmentRef, Json
from providers.agents.records import SessionRef
from providers.agents.store import SessionStore
from providers.agents.transition import Transition
from providers.common.state.scan import read_page, scan_records

_log = logging.getLogger(__name__)
_MAX_ARTIFACTS: Final = 100
"""Files of one turn that become artifacts."""


class ArtifactRecord(msgspec.Struct, kw_only=True):
    """A file as it was at the end of a turn, and its copy in Files."""

    turn_id: str
    environment_id: str
    path: str
    size_bytes: int
    digest: str
    file_id: str
    created_at: int


class SessionArtifacts:
    """The artifacts of all sessions; without `files` there are none."""

    def __init__(self, sessions: SessionStore, workspaces: Workspaces) -> None:
        self._sessions = sessions
        self._kv: KVStore = sessions.kv
        self._workspaces = workspaces
        self._files: Files | None = workspaces.files

    async def copy_outputs(self, session: Transition) -> Mapping[str, ArtifactRecord]:
        """Copy the files that the turn of a session has put out, and return their records by the keys of the copies.
        Files that are too many or too large are left out."""
        files, ref, turn = self._files, session.ref, session.turn
        if files is None:
            return {}
        environment = EnvironmentRef(ref.tenant, session.record.environment_id)
        earlier = await self._list_copies(ref)
        outputs = await self._workspaces.list_files(environment.workspace_id, OUTPUTS_FOLDER, tenant=ref.tenant)
        copies: dict[str, ArtifactRecord] = {}
        for output in sorted(outputs, key=lambda file: file.path)[:_MAX_ARTIFACTS]:
            try:
                data = await self._workspaces.read_file(environment.workspace_id, output.path, tenant=ref.tenant)
            except (InvalidRequest, NotFound) as exc:
                _log.info("a file of a session is no artifact: %s", exc.message)
                continue
            path_hash = hashlib.sha256(output.path.encode()).hexdigest()[:32]
            key = f"{ref.prefix('output')}{turn.id}~{path_hash}"
            digest = hashlib.sha256(data).hexdigest()
            if key in earlier and earlier[key].digest == digest:
                copies[key] = earlier.pop(key)
                continue
            record = ArtifactRecord(
                turn_id=turn.id,
                environment_id=environment.id,
                path=output.path,
                size_bytes=len(data),
                digest=digest,
                file_id="",
                created_at=int(time.time()),
            )
            copies[key] = await self._copy(files, key, record, data, tenant=ref.tenant)
        await self._delete_copies(ref, earlier, copies)
        return copies

    async def _copy(
        self, files: Files, key: str, record: ArtifactRecord, data: bytes, *, tenant: str
    ) -> ArtifactRecord:
        async def stream() -> AsyncGenerator[bytes]:
            yield data

        async def commit(file_id: str) -> Sequence[Op]:
            record.file_id = file_id
            return [Put(key, encode_record(record))]

        request = CreateFile(filename=record.path.rpartition("/")[2], purpose="user_data")
        await files.create(request, stream(), tenant=tenant, source="server", commit=commit)
        return record

    async def _list_copies(self, ref: SessionRef) -> dict[str, ArtifactRecord]:
        async with aclosing(scan_records(self._kv, ref.prefix("output"), ArtifactRecord)) as rows:
            return {row.key: row.record async for row in rows}

    async def _delete_copies(
        self, ref: SessionRef, earlier: Mapping[str, ArtifactRecord], present: Mapping[str, ArtifactRecord]
    ) -> None:
        for key, copy in earlier.items():
            await self._delete_file(ref.tenant, copy.file_id)
            if key not in present:
                await self._kv.write([Delete(key)])

    async def _delete_file(self, tenant: str, file_id: str) -> None:
        if self._files is not None:
            with suppress(NotFound):
                await self._files.delete(file_id, tenant=tenant)

    async def list(self, session_id: str, params: ArtifactListParams, *, tenant: str) -> Page[Json]:
        """Return a page of the artifacts of a session. Raises AgentNotFound, and InvalidRequest for an unknown
        cursor."""
        session = await self._sessions.load(SessionRef(tenant, record_id(session_id)))
        if params.environment_id not in (None, session.record.environment_id):
            return Page([], has_more=False)
        prefix = session.ref.prefix("artifact")
        unknown = InvalidRequest("No artifact of this session has this id.", param="after", code="invalid_value")
        return await read_page(self._kv, prefix, ArtifactRecord, params, unknown, partial(_show, session.ref))

    async def get(self, session_id: str, artifact_id: str, *, tenant: str) -> Json:
        """Return an artifact. Raises AgentNotFound."""
        ref = SessionRef(tenant, record_id(session_id))
        return _show(ref, artifact_id, (await self._load(ref, artifact_id))[1])

    async def content(self, session_id: str, artifact_id: str, *, tenant: str) -> AsyncGenerator[bytes]:
        """Return the bytes of an artifact in chunks. Raises AgentNotFound, also for one whose file was deleted."""
        _, record = await self._load(SessionRef(tenant, record_id(session_id)), artifact_id)
        if self._files is None:
            raise _not_found()
        with suppress(NotFound):
            await self._files.get(record.file_id, tenant=tenant)
            return self._files.content(record.file_id, tenant=tenant)
        raise _not_found()

    async def delete(self, session_id: str, artifact_id: str, *, tenant: str) -> Json:
        """Delete an artifact with its file. Raises AgentNotFound."""
        key, record = await self._load(SessionRef(tenant, record_id(session_id)), artifact_id)
        await self._delete_file(tenant, record.file_id)
        await self._kv.write([Delete(key)])
        return {"id": artifact_id, "object": "agent.session.artifact.deleted", "deleted": True}

    async def delete_all(self, ref: SessionRef) -> None:
        """Delete the files of a deleted session."""
        for kind in ("artifact", "output"):
            async with aclosing(scan_records(self._kv, ref.prefix(kind), ArtifactRecord)) as rows:
                async for row in rows:
                    await self._delete_file(ref.tenant, row.record.file_id)

    async def _load(self, ref: SessionRef, artifact_id: str) -> tuple[str, ArtifactRecord]:
        key = f"{ref.prefix('artifact')}{record_id(artifact_id)}"
        entry = await self._kv.get(key)
        if entry is None:
            raise _not_found()
        return key, decode_record(entry, ArtifactRecord)


def publish(session: Transition, copies: Mapping[str, ArtifactRecord]) -> None:
    """Let the artifacts of a turn appear."""
    for key, record in copies.items():
        session.put(f"{session.ref.prefix('artifact')}artifact_{new_id_key()}", encode_record(record))
        session.delete(key)


def _not_found() -> AgentNotFound:
    return AgentNotFound("No artifact of this session has this id.", param="artifact_id")


def _show(ref: SessionRef, artifact_id: str, record: ArtifactRecord) -> Json:
    fields = ("turn_id", "environment_id", "path", "size_bytes", "created_at")
    values = {name: getattr(record, name) for name in fields}
    return {"id": artifact_id, "object": "agent.session.artifact", "session_id": ref.id, **values}
