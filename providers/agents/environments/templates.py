"""StoredTemplates: configurations of environments that tenants store to use them again.

TENANT/agent_template/ID         the template, as it is shown
TENANT/agent_template_count      the number of templates of the tenant
TENANT/agent_template_spec/ID    its configuration, with what is confidential
"""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from apis.agents.agents import AgentListParams
from apis.agents.environments import (
    CreateTemplate,
    EnvironmentNetwork,
    HostedConfiguration,
    HostedEnvironment,
    NewEnvironment,
    UpdateTemplate,
)
from apis.errors import AgentNotFound, InvalidRequest, StorageCorrupt
from apis.storage.keys import new_id_key, record_id
from apis.storage.kv_store import KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, encode_record
from providers.agents.environments.records import Json
from providers.agents.environments.specs import (
    FIELDS,
    SpecReader,
    dump_configuration,
    parse_configuration,
    show_configuration,
)
from providers.agents.sealed_store import SealedStore
from providers.common.state.change import write_prepared
from providers.common.state.tenant_records import TenantRecords

_MAX_TEMPLATES: Final = 1000
"""Templates of one tenant."""
_PARAM: Final = "environment_template_id"


class TemplateRecord(msgspec.Struct):
    """A template; `visible` has the fields that are shown. Its times are in seconds of Unix time."""

    name: str | None
    visible: Json
    created_at: int
    updated_at: int


class StoredTemplates:
    """The templates of one store."""

    def __init__(self, kv: KVStore, specs: SpecReader, sealed: SealedStore) -> None:
        self._kv = kv
        self._specs = specs
        self._sealed = sealed
        self._records = TenantRecords(kv, "agent_template", TemplateRecord, lambda _: _template_not_found())

    async def create(self, request: CreateTemplate, *, tenant: str) -> Json:
        """Create a template. Raises InvalidRequest, NotFound and Unsupported, which name the field, for a configuration
        that no environment could have now."""
        await self._kv.require_room(tenant)
        await self._specs.prepare(request, tenant=tenant)
        now, template_id = int(time.time()), f"envtmpl_{new_id_key()}"
        record = TemplateRecord(request.name, show_configuration(request), now, now)
        put_spec = self._sealed.build_put(_spec_key(tenant, template_id), dump_configuration(request))
        await self._records.create(tenant, template_id, record, _MAX_TEMPLATES, _build_error, put_spec)
        return _show(template_id, record)

    async def get(self, template_id: str, *, tenant: str) -> Json:
        """Return the template. Raises AgentNotFound."""
        return _show(template_id, await self._records.load(tenant, template_id))

    async def list(self, params: AgentListParams, *, tenant: str) -> Page[Json]:
        """Return a page of templates. Raises AgentNotFound for an unknown cursor."""
        return await self._records.list(tenant, params, _show)

    async def update(self, template_id: str, request: UpdateTemplate, *, tenant: str) -> Json:
        """Change the fields that the request has, and return the template. Raises AgentNotFound, and as `create`."""
        template_id = record_id(template_id)
        record: TemplateRecord | None = None

        async def prepare() -> Sequence[Op]:
            nonlocal record
            key, spec_key = self._records.key(tenant, template_id), _spec_key(tenant, template_id)
            entry, spec_entry = await self._kv.get_many([key, spec_key])
            if entry is None:
                raise _template_not_found()
            if spec_entry is None:
                raise StorageCorrupt
            before, sent = decode_record(entry, TemplateRecord), request.model_fields_set
            stored_spec = self._sealed.read(spec_key, spec_entry)
            spec = {name: value for name, value in stored_spec.items() if name not in sent}
            spec.update(dump_configuration(request))
            configuration = parse_configuration(spec)
            await self._specs.prepare(configuration, tenant=tenant)
            name = request.name if "name" in sent else before.name
            record = TemplateRecord(name, show_configuration(configuration), before.created_at, int(time.time()))
            return [Put(key, encode_record(record), None, entry.version), *self._sealed.build_put(spec_key, spec)]

        await write_prepared(self._kv, prepare)
        assert record is not None  # every preparation makes one
        return _show(template_id, record)

    async def delete(self, template_id: str, *, tenant: str) -> Json:
        """Delete the template; environments that were made of it stay. Raises AgentNotFound."""
        await self._records.delete(
            tenant, template_id, lambda _: self._sealed.build_delete(_spec_key(tenant, template_id))
        )
        return {"id": template_id, "object": "agent.environment.template.deleted", "deleted": True}

    async def apply(self, environment: NewEnvironment | HostedEnvironment, *, tenant: str) -> HostedConfiguration:
        """Return the configuration of a new environment: its own fields, and for the others those of its template.
        Raises AgentNotFound, and InvalidRequest for a network that is wider than that of the template."""
        if environment.environment_template_id is None:
            return environment
        spec_key = _spec_key(tenant, record_id(environment.environment_template_id))
        entry = await self._kv.get(spec_key)
        if entry is None:
            raise _template_not_found(_PARAM)
        template = parse_configuration(self._sealed.read(spec_key, entry))
        _check_network(environment.network, template.network)
        own = {name: value for name in FIELDS if (value := getattr(environment, name)) is not None}
        return template.model_copy(update=own)


def _check_network(network: EnvironmentNetwork | None, template: EnvironmentNetwork | None) -> None:
    """Raise InvalidRequest for a network that opens more than that of the template."""
    if network is None or network.access == "disabled" or (template is not None and template.access == "enabled"):
        return
    open_domains = template.allowed_domains or () if template is not None and template.access == "restricted" else ()
    if network.access == "enabled" or not set(network.allowed_domains or ()) <= set(open_domains):
        raise InvalidRequest(
            "The network of an environment opens no more than that of its template.",
            param="network",
            code="invalid_value",
        )


def _spec_key(tenant: str, template_id: str) -> str:
    return f"{tenant}/agent_template_spec/{template_id}"


def _template_not_found(param: str = "template_id") -> AgentNotFound:
    return AgentNotFound("No template of environments has this id.", param=param)


def _build_error(_count: int) -> InvalidRequest:
    return InvalidRequest(f"A project has at most {_MAX_TEMPLATES} templates of environments.")


def _show(template_id: str, record: TemplateRecord) -> Json:
    fields: dict[str, Any] = {
        **record.visible,
        "id": template_id,
        "object": "agent.environment.template",
        "name": record.name,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
    }
    return fields
