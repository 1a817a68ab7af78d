"""PROVIDERS: every provider a run config may name. Adding one is one new file and one new line here."""

from typing import Final

PROVIDERS: Final[dict[str, dict[str, str]]] = {
    "accounts": {
        "chain": "providers.accounts.chain:ChainedAccounts",
        "config": "providers.accounts.config:ConfigAccounts",
        "oidc": "providers.accounts.oidc.provider:OpenIDAccounts",
        "stored": "providers.accounts.stored:StoredAccounts",
    },
    "agents": {
        "kv": "providers.agents.kv:StoredAgents",
    },
    "batches": {
        "leased": "providers.batches.leased:LeasedBatches",
    },
    "fetcher": {
        "safe": "providers.fetcher.safe:GuardedFetcher",
    },
    "files": {
        "kv": "providers.files.kv:StoredFiles",
        "object_store": "providers.files.object_store:ObjectStoreFiles",
    },
    "image_generator": {
        "openai_images": "providers.image_generator.openai_images:OpenAIImages",
    },
    "inference": {
        "gpt_oss": "providers.inference.gpt_oss.provider:GptOss",
        "llama_cpp": "providers.inference.llama_cpp.provider:LlamaCpp",
        "minilm": "providers.inference.minilm.provider:MiniLM",
        "next_token": "providers.inference.next_token:NextToken",
        "router": "providers.inference.router:Router",
        "scripted": "providers.inference.scripted:Scripted",
        "vllm": "providers.inference.vllm:VLLM",
    },
    "kv_store": {
        "memory": "providers.kv_store.memory:Memory",
        "postgres": "providers.kv_store.postgres:Postgres",
        "redis": "providers.kv_store.redis:Redis",
        "sqlite": "providers.kv_store.sqlite:SQLite",
    },
    "moderation": {
        "guard": "providers.moderation.guard:GuardModeration",
        "predicates": "providers.moderation.predicates:PredicateModeration",
    },
    "reader": {
        "child": "providers.reader.child:ChildReader",
    },
    "responses": {
        "loop": "providers.responses.loop:ResponsesLoop",
    },
    "skills": {
        "kv": "providers.skills.kv:StoredSkills",
    },
    "tool_runtime": {
        "brave": "providers.tool_runtime.brave:Brave",
        "browser": "providers.tool_runtime.browser.provider:Browser",
        "exa": "providers.tool_runtime.exa:Exa",
        "python": "providers.tool_runtime.python.provider:Python",
        "searxng": "providers.tool_runtime.searxng:SearXNG",
        "tavily": "providers.tool_runtime.tavily:Tavily",
        "toolbox": "providers.tool_runtime.toolbox:Toolbox",
    },
    "tool_servers": {
        "mcp": "providers.tool_servers.mcp.provider:MCP",
    },
    "traces": {
        "kv": "providers.traces.kv:StoredTraces",
    },
    "uploads": {
        "kv": "providers.uploads.kv:StoredUploads",
    },
    "vaults": {
        "kv": "providers.vaults.kv:StoredVaults",
    },
    "vector_index": {
        "pgvector": "providers.vector_index.pgvector:PgVector",
        "sqlite_vec": "providers.vector_index.sqlite_vec:SQLiteVec",
    },
    "vector_stores": {
        "hybrid": "providers.vector_stores.hybrid:HybridVectorStores",
    },
    "webhooks": {
        "kv": "providers.webhooks.kv:StoredWebhooks",
    },
}

MODEL_CHOICE_PROVIDER: Final = "llama_cpp"
"""The inference provider whose models `stack run --model` chooses."""
