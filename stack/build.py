"""open_stack: from a StackConfig to live providers, started in the order of their dependencies, closed in reverse."""

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, cast

from apis.accounts.accounts import Accounts, Caller, ConfiguredKeys, digest_key
from apis.accounts.scopes import ADMIN_SCOPE, PROJECT_SCOPES, Grant
from apis.errors import ConfigError, StackError
from apis.fair_share import Tenants
from apis.inference import Inference
from apis.provider import Provider
from apis.responses import Responses
from apis.storage.kv_store import KVStore
from apis.webhooks import Webhooks
from stack.api_table import APIS
from stack.config import StackConfig
from stack.wiring import ProviderSpec, wire_providers

if TYPE_CHECKING:  # their modules are loaded where a run config has the API
    from apis.documents.fetcher import Fetcher
    from apis.documents.files import Files
    from apis.documents.reader import Reader
    from apis.documents.vector_stores import VectorStores
    from apis.image_generator import ImageGenerator
    from apis.moderation import Moderation
    from apis.skills.skills import Skills
    from apis.tool_runtime import ToolRuntime
    from apis.vaults.vaults import Vaults
    from providers.accounts.organization import StoredOrganization
    from providers.agents.kv import StoredAgents
    from providers.batches.leased import LeasedBatches
    from providers.traces.kv import StoredTraces
    from providers.uploads.kv import StoredUploads


@dataclass(frozen=True, slots=True)
class Stack:
    """The live providers of a run config by their APIs, of which those that the config does not have are None, and all
    of them by their paths in it."""

    config: StackConfig
    specs: Mapping[str, ProviderSpec]
    inference: Inference
    responses: Responses
    kv_store: KVStore
    accounts: Accounts
    webhooks: Webhooks
    tool_runtime: "ToolRuntime | None" = None
    agents: "StoredAgents | None" = None
    files: "Files | None" = None
    vector_stores: "VectorStores | None" = None
    fetcher: "Fetcher | None" = None
    reader: "Reader | None" = None
    traces: "StoredTraces | None" = None
    uploads: "StoredUploads | None" = None
    batches: "LeasedBatches | None" = None
    skills: "Skills | None" = None
    image_generator: "ImageGenerator | None" = None
    moderation: "Moderation | None" = None
    vaults: "Vaults | None" = None
    providers_by_path: Mapping[str, Provider] = field(default_factory=dict[str, Provider])

    @property
    def organization(self) -> "StoredOrganization | None":
        """The projects that the store has, with all about them; None where they are those of the run config."""
        return find_organization(self.accounts)


@asynccontextmanager
async def open_stack(
    config: StackConfig, observe_inference: Callable[[Inference], Inference] = lambda inference: inference
) -> AsyncGenerator[Stack]:
    """Build and start all providers of `config`; on exit, or when a start fails, close them, last started first.
    `observe_inference` returns the inference that the other providers and the routes receive.

    Raises ConfigError, and the StackError of a provider that cannot start without a service that is unavailable.
    """
    parts = wire_providers(config)
    async with open_providers(config, parts, observe_inference=observe_inference) as (live, order):
        yield Stack(
            config=config,
            specs=parts,
            providers_by_path={part.path: provider for part, provider in order},
            **cast("dict[str, Any]", {api: live.get(api) for api in Stack.__slots__ if api in APIS}),
        )


@asynccontextmanager
async def open_providers(
    config: StackConfig,
    specs: Mapping[str, ProviderSpec],
    apis: Iterable[str] = APIS,
    *,
    started: type[Provider] | UnionType = Provider,
    observe_inference: Callable[[Inference], Inference] = lambda inference: inference,
) -> AsyncGenerator[tuple[dict[str, Provider], list[tuple[ProviderSpec, Provider]]]]:
    """Yield what `build_providers` returns, after the start of those that are `started`; on exit, or when a start
    fails, close them, last started first. Raises as `open_stack`."""
    live, order = build_providers(config, specs, apis, observe_inference)
    async with AsyncExitStack() as entered:
        for part, provider in order:
            if isinstance(provider, started):
                # before the start, because closing is promised to be safe after one that failed
                entered.push_async_callback(provider.close)
                with locate_errors(config, part.path):
                    await provider.start()
                    _check_shared_use(config, provider)
        yield live, order


def find_organization(accounts: Accounts) -> "StoredOrganization | None":
    """Return what these accounts keep of their projects; None where these are those of the run config."""
    return cast("StoredOrganization | None", accounts.organization())


def _check_shared_use(config: StackConfig, provider: Provider) -> None:
    risk = provider.shared_use_risk()
    if risk is not None and _collect_tenants(config).are_several:
        where = "accounts" if config.has_stored_tenants else "server.api_keys"
        raise ConfigError(f"{where} has several tenants, and {risk}")


def confinement_lines(stack: Stack) -> list[str]:
    """Return a line for each provider that runs untrusted programs or parses untrusted files: what holds them."""
    holds = {path: provider.confinement() for path, provider in stack.providers_by_path.items()}
    return align_lines({path: line for path, line in holds.items() if line is not None})


async def secret_lines(stack: Stack) -> list[str]:
    """Return a line for each provider that keeps secrets of clients: how it keeps them."""
    lines = {path: await provider.describe_secrets() for path, provider in stack.providers_by_path.items()}
    return align_lines({path: line for path, line in lines.items() if line is not None})


def machine_lines(stack: Stack) -> list[str]:
    """Return a line for each provider that holds state on this machine alone, although machines can share the store."""
    if not stack.kv_store.spans_machines:
        return []
    states = {path: provider.machine_bound_state() for path, provider in stack.providers_by_path.items()}
    return align_lines(
        {path: f"not shared by machines: {state}" for path, state in states.items() if state is not None}
    )


def describe_machines(stack: Stack) -> str:
    """Return how many machines may serve the stack together, and what they do not share."""
    store = type(stack.kv_store).__name__
    if not stack.kv_store.spans_machines:
        return f"one: the store ({store}) is of this machine alone; several need kv_store postgres or redis"
    bound = [path for path, provider in stack.providers_by_path.items() if provider.machine_bound_state() is not None]
    exceptions = f", except what is not shared: {', '.join(bound)}" if bound else ""
    return f"any number, which share all by the store ({store}){exceptions}"


def align_lines(lines: Mapping[str, str]) -> list[str]:
    """Return each line after its name, all from one column on."""
    width = max((12, *map(len, lines))) + 2
    return [f"{name:<{width}}{line}" for name, line in lines.items()]


@contextmanager
def locate_errors(config: StackConfig, path: str) -> Generator[None]:
    """Add the file, and the provider's path in it, to the errors of a provider."""
    try:
        yield
    except ConfigError as exc:
        message = str(exc)
        where = config.source if message.startswith(path) else f"{config.source}: {path}"
        raise ConfigError(f"{where}: {message}") from exc
    except StackError as exc:
        exc.add_note(f"{config.source}: {path}")
        raise


def build_providers(
    config: StackConfig,
    specs: Mapping[str, ProviderSpec],
    apis: Iterable[str] = APIS,
    observe_inference: Callable[[Inference], Inference] = lambda inference: inference,
) -> tuple[dict[str, Provider], list[tuple[ProviderSpec, Provider]]]:
    """Return the provider of each of `apis` and of those that they need, and all providers, members included, each
    after its dependencies; start none.

    Raises ConfigError for a cycle and for a required API that the config does not have.
    """
    builder = _Builder(config, specs, observe_inference)
    for api in apis:
        if api in specs:
            builder.get_or_build(api, ())
    return builder.providers_by_api, builder.start_order


def _collect_tenants(config: StackConfig) -> Tenants:
    return Tenants(config.server.tenants, may_grow=config.has_stored_tenants)


def _collect_keys(config: StackConfig) -> ConfiguredKeys:
    callers: dict[bytes, Caller] = {}
    for number, entry in enumerate(config.server.api_keys):
        grant = Grant(PROJECT_SCOPES | ADMIN_SCOPE if entry.admin else PROJECT_SCOPES)
        callers[digest_key(entry.key.get_secret_value().encode())] = Caller(entry.tenant, f"key_config_{number}", grant)
    return ConfiguredKeys(callers)


class _Builder:
    def __init__(
        self,
        config: StackConfig,
        specs: Mapping[str, ProviderSpec],
        observe_inference: Callable[[Inference], Inference],
    ) -> None:
        self._observe_inference = observe_inference
        self._source = config.source
        self._specs = specs
        self._facts: Mapping[type, object] = {Tenants: _collect_tenants(config), ConfiguredKeys: _collect_keys(config)}
        self.providers_by_api: dict[str, Provider] = {}
        self.start_order: list[tuple[ProviderSpec, Provider]] = []

    def get_or_build(self, api: str, dependents: tuple[ProviderSpec, ...]) -> Provider:
        """Return the stack's one provider of `api`; `dependents` are those that require it, the outermost first."""
        if api not in self.providers_by_api:
            part = self._specs[api]
            if part in dependents:
                cycle = " -> ".join(str(link) for link in (*dependents[dependents.index(part) :], part))
                raise ConfigError(
                    f"{self._source}: the providers need each other in a circle: {cycle}. Choose another for one."
                )
            provider = self._build(part, dependents)
            self.providers_by_api[api] = (
                self._observe_inference(provider) if isinstance(provider, Inference) else provider
            )
        return self.providers_by_api[api]

    def _build(self, spec: ProviderSpec, dependents: tuple[ProviderSpec, ...]) -> Provider:
        dependents = (*dependents, spec)
        arguments: dict[str, Any] = {}
        for name, need in spec.dependencies.items():
            if need.api in self._specs:
                arguments[name] = self.get_or_build(need.api, dependents)
            elif need.optional:
                arguments[name] = None
            else:
                requirer = " -> ".join(str(link) for link in dependents)
                raise ConfigError(f"{self._source}: {need.api}: is required by {requirer}. Add the section {need.api}.")
        for name, members in spec.members.items():
            arguments[name] = {key: self._build(member, dependents) for key, member in members.items()}
        arguments |= {name: self._facts[kind] for name, kind in spec.fact_parameters.items()}
        provider = cast("Any", spec.provider_type)(config=spec.config, **arguments)
        self.start_order.append((spec, provider))
        return cast("Provider", provider)
