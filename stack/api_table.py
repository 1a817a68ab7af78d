"""The APIs that a run config names, and the providers that they have without being named."""

from typing import Final

from apis.accounts.accounts import ConfiguredKeys
from apis.fair_share import Tenants

APIS: Final[dict[str, str]] = {
    "inference": "apis.inference:Inference",
    "responses": "apis.responses:Responses",
    "agents": "providers.agents.kv:StoredAgents",
    "tool_runtime": "apis.tool_runtime:ToolRuntime",
    "tool_servers": "apis.tool_servers:ToolServers",
    "kv_store": "apis.storage.kv_store:KVStore",
    "fetcher": "apis.documents.fetcher:Fetcher",
    "files": "apis.documents.files:Files",
    "image_generator": "apis.image_generator:ImageGenerator",
    "moderation": "apis.moderation:Moderation",
    "reader": "apis.documents.reader:Reader",
    "traces": "providers.traces.kv:StoredTraces",
    "skills": "apis.skills.skills:Skills",
    "vaults": "apis.vaults.vaults:Vaults",
    "vector_index": "apis.documents.vector_index:VectorIndex",
    "vector_stores": "apis.documents.vector_stores:VectorStores",
    "uploads": "providers.uploads.kv:StoredUploads",
    "batches": "providers.batches.leased:LeasedBatches",
    "accounts": "apis.accounts.accounts:Accounts",
    "webhooks": "apis.webhooks:Webhooks",
}
"""The class of each API, which is imported with the providers that a run config names."""
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
