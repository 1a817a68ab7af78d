"""The APIs that a run config names, and the providers that they have without being named."""

from typing import Final

from apis.accounts.accounts import Accounts, ConfiguredKeys
from apis.documents.fetcher import Fetcher
from apis.documents.files import Files
from apis.documents.reader import Reader
from apis.documents.vector_index import VectorIndex
from apis.documents.vector_stores import VectorStores
from apis.fair_share import Tenants
from apis.image_generator import ImageGenerator
from apis.inference import Inference
from apis.moderation import Moderation
from apis.provider import Provider
from apis.responses import Responses
from apis.skills.skills import Skills
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolRuntime
from apis.tool_servers import ToolServers
from apis.vaults.vaults import Vaults
from apis.webhooks import Webhooks
from providers.agents.kv import StoredAgents
from providers.batches.leased import LeasedBatches
from providers.traces.kv import StoredTraces
from providers.uploads.kv import StoredUploads

APIS: Final[dict[str, type[Provider]]] = {
    "inference": Inference,
    "responses": Responses,
    "agents": StoredAgents,
    "tool_runtime": ToolRuntime,
    "tool_servers": ToolServers,
    "kv_store": KVStore,
    "fetcher": Fetcher,
    "files": Files,
    "image_generator": ImageGenerator,
    "moderation": Moderation,
    "reader": Reader,
    "traces": StoredTraces,
    "skills": Skills,
    "vaults": Vaults,
    "vector_index": VectorIndex,
    "vector_stores": VectorStores,
    "uploads": StoredUploads,
    "batches": LeasedBatches,
    "accounts": Accounts,
    "webhooks": Webhooks,
}
RUN_FACTS: Final[frozenset[type]] = frozenset({ConfiguredKeys, Tenants})
"""Types of a constructor's parameters that stand for the keys and tenants of the `server` section."""
DEFAULT_PROVIDERS: Final = {
    "fetcher": "safe",
    "files": "kv",
    "reader": "child",
    "skills": "kv",
    "vector_index": "sqlite_vec",
}
"""Providers of the APIs that another provider needs and the run config does not name."""
COMPANION_PROVIDERS: Final = {"files": {"uploads": "kv", "batches": "leased"}}
"""Providers of the APIs that every stack with a certain API has, also where the run config does not name them."""
