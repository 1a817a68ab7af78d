"""Every field that the official SDK can send is read by a request model, or stands in the table of fields that are not.

A failure here after an upgrade of the SDK shows the new fields: add each to its request model, or a row to
`apis/wire/field_rows.py`.
"""

import re
from pathlib import Path
from typing import Any, Final

import pytest
from openai import resources, types
from openai.types import (
    audio,
    beta,
    chat,
    containers,
    conversations,
    responses,
    skills,
    uploads,
    vector_stores,
    webhooks,
)
from openai.types.admin import organization
from openai.types.admin.organization import projects
from openai.types.admin.organization.projects import service_accounts
from openai.types.beta import agents as beta_agents
from openai.types.beta.agents import automations, environments, sessions, vaults
from openai.types.beta.agents.sessions import subagents, turns
from openai.types.beta.agents.sessions.subagents import turns as subagent_turns
from pydantic import BaseModel

from apis.accounts.audit import AuditLogQuery
from apis.accounts.directory import (
    AdminKeyPage,
    CreateAdminKey,
    CreateProject,
    CreateServiceAccount,
    CreateServiceAccountKey,
    KeyPage,
    ProjectPage,
    UpdateKey,
    UpdateProject,
    UpdateServiceAccount,
)
from apis.accounts.project_settings import (
    UpdateDataRetention,
    UpdateHostedToolPermissions,
    UpdateModelPermissions,
    UpdateServiceTierSettings,
)
from apis.accounts.requests import (
    AccountPage,
    CostsQuery,
    FileSearchUsageQuery,
    ImagesUsageQuery,
    RateLimitPage,
    UpdateRateLimit,
    UsageQuery,
    WebSearchUsageQuery,
)
from apis.accounts.spend_alerts import SaveSpendAlert, SpendAlertPage
from apis.accounts.spending import UpdateSpendLimit
from apis.agents.agents import AgentListParams, CreateAgent, UpdateAgent
from apis.agents.automations import (
    AutomationListParams,
    CreateAutomation,
    UpdateAutomation,
)
from apis.agents.environments import (
    ArtifactListParams,
    CreateEnvironment,
    CreateEnvironmentFile,
    CreateTemplate,
    EnvironmentFileListParams,
    EnvironmentListParams,
    UpdateTemplate,
)
from apis.agents.sessions import (
    CreateSession,
    EventStreamParams,
    SendEvents,
    SessionListParams,
    UpdateSession,
)
from apis.batches.batches import BatchListParams, CreateBatch
from apis.containers import ContainerListParams, CopyFile, CreateContainer
from apis.conversations import AddItems, CreateConversation, ItemInclude, ItemListParams, UpdateConversation
from apis.documents.embeddings import EmbeddingRequest
from apis.documents.files import CreateFile, FileListParams
from apis.documents.vector_store_requests import (
    AddFile,
    AddFiles,
    CreateVectorStore,
    SearchStores,
    UpdateFile,
    UpdateVectorStore,
    VectorStoreFileListParams,
    VectorStoreListParams,
)
from apis.images import CreateImage, EditImage
from apis.moderation import CreateModeration
from apis.responses import CompactConversation, CreateResponse, InputItemListParams
from apis.skills.skills import CreateSkillVersion, UpdateSkill
from apis.transcription import CreateTranscription
from apis.uploads import CompleteUpload, CreateUpload
from apis.vaults.requests import (
    CreateCredential,
    CreateVault,
    UpdateCredential,
    UpdateVault,
    VaultListParams,
)
from apis.webhooks import (
    CreateWebhookEndpoint,
    RotateWebhookSecret,
    SendTestEvent,
    UpdateWebhookEndpoint,
    WebhookEndpointPage,
)
from apis.wire.base import ListParams
from apis.wire.decisions import CreateDecision
from apis.wire.field_rows import FIELD_ROWS, UNSUPPORTED_TYPES
from stack.http.routes.absences import ABSENT_RESOURCES
from stack.http.routes.chat import CreateChatCompletion
from stack.http.routes.completions import CreateCompletion
from stack.http.routes.responses import CountInputTokens, ResponseParams
from stack.http.routes.table import API_ROUTES
from tests.support.sdk.param_types import Gap, find_gaps, list_models

PAIRS: Final[dict[str, tuple[Any, tuple[type[BaseModel], ...]]]] = {
    "POST /responses": (responses.response_create_params.ResponseCreateParams, (CreateResponse,)),
    "POST /responses/compact": (responses.response_compact_params.ResponseCompactParams, (CompactConversation,)),
    "POST /responses/input_tokens": (responses.input_token_count_params.InputTokenCountParams, (CountInputTokens,)),
    "GET /responses/{response_id}": (responses.response_retrieve_params.ResponseRetrieveParams, (ResponseParams,)),
    "GET /responses/{response_id}/input_items": (
        responses.input_item_list_params.InputItemListParams,
        (InputItemListParams,),
    ),
    "POST /conversations": (conversations.conversation_create_params.ConversationCreateParams, (CreateConversation,)),
    "POST /conversations/{conversation_id}": (
        conversations.conversation_update_params.ConversationUpdateParams,
        (UpdateConversation,),
    ),
    "POST /conversations/{conversation_id}/items": (
        conversations.item_create_params.ItemCreateParams,
        (AddItems, ItemInclude),
    ),
    "GET /conversations/{conversation_id}/items": (conversations.item_list_params.ItemListParams, (ItemListParams,)),
    "GET /conversations/{conversation_id}/items/{item_id}": (
        conversations.item_retrieve_params.ItemRetrieveParams,
        (ItemInclude,),
    ),
    "POST /agents/automations": (beta_agents.automation_create_params.AutomationCreateParams, (CreateAutomation,)),
    "GET /agents/automations": (beta_agents.automation_list_params.AutomationListParams, (AutomationListParams,)),
    "POST /agents/automations/{automation_id}": (
        beta_agents.automation_update_params.AutomationUpdateParams,
        (UpdateAutomation,),
    ),
    "GET /agents/automations/{automation_id}/invocations": (
        automations.invocation_list_params.InvocationListParams,
        (AgentListParams,),
    ),
    "POST /agents/environments": (
        beta_agents.environment_create_params.EnvironmentCreateParams,
        (CreateEnvironment,),
    ),
    "GET /agents/environments": (beta_agents.environment_list_params.EnvironmentListParams, (EnvironmentListParams,)),
    "POST /agents/environments/templates": (
        environments.template_create_params.TemplateCreateParams,
        (CreateTemplate,),
    ),
    "GET /agents/environments/templates": (
        environments.template_list_params.TemplateListParams,
        (AgentListParams,),
    ),
    "POST /agents/environments/templates/{template_id}": (
        environments.template_update_params.TemplateUpdateParams,
        (UpdateTemplate,),
    ),
    "POST /agents/environments/{environment_id}/files": (
        environments.file_create_params.FileCreateParams,
        (CreateEnvironmentFile,),
    ),
    "GET /agents/environments/{environment_id}/files": (
        environments.file_list_params.FileListParams,
        (EnvironmentFileListParams,),
    ),
    "POST /agents": (beta.agent_create_params.AgentCreateParams, (CreateAgent,)),
    "GET /agents": (beta.agent_list_params.AgentListParams, (AgentListParams,)),
    "POST /agents/{agent_id}": (beta.agent_update_params.AgentUpdateParams, (UpdateAgent,)),
    "POST /agents/sessions": (
        beta_agents.session_create_params.SessionCreateParamsStreaming,
        (CreateSession,),
    ),
    "GET /agents/sessions": (beta_agents.session_list_params.SessionListParams, (SessionListParams,)),
    "POST /agents/sessions/{session_id}": (beta_agents.session_update_params.SessionUpdateParams, (UpdateSession,)),
    "POST /agents/sessions/{session_id}/events": (sessions.event_create_params.EventCreateParams, (SendEvents,)),
    "GET /agents/sessions/{session_id}/events": (sessions.event_stream_params.EventStreamParams, (EventStreamParams,)),
    "GET /agents/sessions/{session_id}/items": (sessions.item_list_params.ItemListParams, (AgentListParams,)),
    "GET /agents/sessions/{session_id}/turns": (sessions.turn_list_params.TurnListParams, (ListParams,)),
    "GET /agents/sessions/{session_id}/turns/{turn_id}/items": (
        turns.item_list_params.ItemListParams,
        (AgentListParams,),
    ),
    "POST /vaults": (beta_agents.vault_create_params.VaultCreateParams, (CreateVault,)),
    "GET /vaults": (beta_agents.vault_list_params.VaultListParams, (VaultListParams,)),
    "POST /vaults/{vault_id}": (beta_agents.vault_update_params.VaultUpdateParams, (UpdateVault,)),
    "POST /vaults/{vault_id}/credentials": (
        vaults.credential_create_params.CredentialCreateParams,
        (CreateCredential,),
    ),
    "GET /vaults/{vault_id}/credentials": (vaults.credential_list_params.CredentialListParams, (VaultListParams,)),
    "POST /vaults/{vault_id}/credentials/{credential_id}": (
        vaults.credential_update_params.CredentialUpdateParams,
        (UpdateCredential,),
    ),
    "GET /agents/sessions/{session_id}/subagents": (
        sessions.subagent_list_params.SubagentListParams,
        (ListParams,),
    ),
    "GET /agents/sessions/{session_id}/subagents/{subagent_id}/items": (
        subagents.item_list_params.ItemListParams,
        (AgentListParams,),
    ),
    "GET /agents/sessions/{session_id}/subagents/{subagent_id}/turns": (
        subagents.turn_list_params.TurnListParams,
        (ListParams,),
    ),
    "GET /agents/sessions/{session_id}/subagents/{subagent_id}/turns/{turn_id}/items": (
        subagent_turns.item_list_params.ItemListParams,
        (AgentListParams,),
    ),
    "GET /agents/sessions/{session_id}/artifacts": (
        sessions.artifact_list_params.ArtifactListParams,
        (ArtifactListParams,),
    ),
    "POST /files": (types.FileCreateParams, (CreateFile,)),
    "GET /files": (types.FileListParams, (FileListParams,)),
    "POST /vector_stores": (types.VectorStoreCreateParams, (CreateVectorStore,)),
    "GET /vector_stores": (types.VectorStoreListParams, (VectorStoreListParams,)),
    "POST /vector_stores/{store_id}": (types.VectorStoreUpdateParams, (UpdateVectorStore,)),
    "POST /vector_stores/{store_id}/search": (types.VectorStoreSearchParams, (SearchStores,)),
    "POST /vector_stores/{store_id}/files": (vector_stores.FileCreateParams, (AddFile,)),
    "GET /vector_stores/{store_id}/files": (vector_stores.FileListParams, (VectorStoreFileListParams,)),
    "POST /vector_stores/{store_id}/files/{file_id}": (vector_stores.FileUpdateParams, (UpdateFile,)),
    "POST /vector_stores/{store_id}/file_batches": (vector_stores.FileBatchCreateParams, (AddFiles,)),
    "GET /vector_stores/{store_id}/file_batches/{batch_id}/files": (
        vector_stores.FileBatchListFilesParams,
        (VectorStoreFileListParams,),
    ),
    "POST /containers": (types.ContainerCreateParams, (CreateContainer,)),
    "GET /containers": (types.ContainerListParams, (ContainerListParams,)),
    "POST /containers/{container_id}/files": (containers.FileCreateParams, (CopyFile,)),
    "GET /containers/{container_id}/files": (containers.FileListParams, (ContainerListParams,)),
    "POST /skills": (types.SkillCreateParams, ()),
    "GET /skills": (types.SkillListParams, (ListParams,)),
    "POST /skills/{skill_id}": (types.SkillUpdateParams, (UpdateSkill,)),
    "POST /skills/{skill_id}/versions": (skills.VersionCreateParams, (CreateSkillVersion,)),
    "GET /skills/{skill_id}/versions": (skills.VersionListParams, (ListParams,)),
    "POST /uploads": (types.UploadCreateParams, (CreateUpload,)),
    "POST /uploads/{upload_id}/parts": (uploads.PartCreateParams, ()),
    "POST /uploads/{upload_id}/complete": (types.UploadCompleteParams, (CompleteUpload,)),
    "POST /batches": (types.BatchCreateParams, (CreateBatch,)),
    "GET /batches": (types.BatchListParams, (BatchListParams,)),
    "POST /webhook_endpoints": (webhooks.WebhookCreateParams, (CreateWebhookEndpoint,)),
    "GET /webhook_endpoints": (webhooks.WebhookListParams, (WebhookEndpointPage,)),
    "POST /webhook_endpoints/{webhook_endpoint_id}": (webhooks.WebhookUpdateParams, (UpdateWebhookEndpoint,)),
    "POST /webhook_endpoints/{webhook_endpoint_id}/rotate_secret": (
        webhooks.WebhookRotateSecretParams,
        (RotateWebhookSecret,),
    ),
    "POST /webhook_endpoints/{webhook_endpoint_id}/test": (webhooks.WebhookTestParams, (SendTestEvent,)),
    "POST /organization/projects": (organization.ProjectCreateParams, (CreateProject,)),
    "GET /organization/projects": (organization.ProjectListParams, (ProjectPage,)),
    "POST /organization/projects/{project_id}": (organization.ProjectUpdateParams, (UpdateProject,)),
    "POST /organization/projects/{project_id}/service_accounts": (
        projects.ServiceAccountCreateParams,
        (CreateServiceAccount,),
    ),
    "GET /organization/projects/{project_id}/service_accounts": (projects.ServiceAccountListParams, (AccountPage,)),
    "POST /organization/projects/{project_id}/service_accounts/{service_account_id}": (
        projects.ServiceAccountUpdateParams,
        (UpdateServiceAccount,),
    ),
    "POST /organization/projects/{project_id}/service_accounts/{service_account_id}/api_keys": (
        service_accounts.APIKeyCreateParams,
        (CreateServiceAccountKey,),
    ),
    "GET /organization/projects/{project_id}/api_keys": (projects.APIKeyListParams, (KeyPage,)),
    "POST /organization/projects/{project_id}/api_keys/{api_key_id}": (projects.APIKeyUpdateParams, (UpdateKey,)),
    "POST /organization/projects/{project_id}/model_permissions": (
        projects.ModelPermissionUpdateParams,
        (UpdateModelPermissions,),
    ),
    "POST /organization/projects/{project_id}/hosted_tool_permissions": (
        projects.HostedToolPermissionUpdateParams,
        (UpdateHostedToolPermissions,),
    ),
    "POST /organization/projects/{project_id}/service_tier_settings": (
        projects.ServiceTierSettingUpdateParams,
        (UpdateServiceTierSettings,),
    ),
    "POST /organization/projects/{project_id}/data_retention": (
        projects.DataRetentionUpdateParams,
        (UpdateDataRetention,),
    ),
    "GET /organization/audit_logs": (organization.AuditLogListParams, (AuditLogQuery,)),
    "GET /organization/projects/{project_id}/rate_limits": (projects.RateLimitListRateLimitsParams, (RateLimitPage,)),
    "POST /organization/projects/{project_id}/rate_limits/{rate_limit_id:path}": (
        projects.RateLimitUpdateRateLimitParams,
        (UpdateRateLimit,),
    ),
    "GET /organization/usage/completions": (organization.UsageCompletionsParams, (UsageQuery,)),
    "GET /organization/usage/decisions": (organization.UsageDecisionsParams, (UsageQuery,)),
    "GET /organization/usage/embeddings": (organization.UsageEmbeddingsParams, (UsageQuery,)),
    "GET /organization/usage/images": (organization.UsageImagesParams, (ImagesUsageQuery,)),
    "GET /organization/usage/web_search_calls": (organization.UsageWebSearchCallsParams, (WebSearchUsageQuery,)),
    "GET /organization/usage/file_search_calls": (organization.UsageFileSearchCallsParams, (FileSearchUsageQuery,)),
    "GET /organization/costs": (organization.UsageCostsParams, (CostsQuery,)),
    "POST /organization/spend_limit": (organization.SpendLimitUpdateParams, (UpdateSpendLimit,)),
    "POST /organization/projects/{project_id}/spend_limit": (
        projects.SpendLimitUpdateParams,
        (UpdateSpendLimit,),
    ),
    "POST /organization/spend_alerts": (organization.SpendAlertCreateParams, (SaveSpendAlert,)),
    "GET /organization/spend_alerts": (organization.SpendAlertListParams, (SpendAlertPage,)),
    "POST /organization/spend_alerts/{alert_id}": (organization.SpendAlertUpdateParams, (SaveSpendAlert,)),
    "POST /organization/projects/{project_id}/spend_alerts": (projects.SpendAlertCreateParams, (SaveSpendAlert,)),
    "GET /organization/projects/{project_id}/spend_alerts": (projects.SpendAlertListParams, (SpendAlertPage,)),
    "POST /organization/projects/{project_id}/spend_alerts/{alert_id}": (
        projects.SpendAlertUpdateParams,
        (SaveSpendAlert,),
    ),
    "POST /organization/admin_api_keys": (organization.AdminAPIKeyCreateParams, (CreateAdminKey,)),
    "GET /organization/admin_api_keys": (organization.AdminAPIKeyListParams, (AdminKeyPage,)),
    "POST /decisions": (types.decision_create_params.DecisionCreateParams, (CreateDecision,)),
    "POST /moderations": (types.ModerationCreateParams, (CreateModeration,)),
    "GET /organization/usage/moderations": (organization.UsageModerationsParams, (UsageQuery,)),
    "POST /images/generations": (types.image_generate_params.ImageGenerateParams, (CreateImage,)),
    "POST /images/edits": (types.image_edit_params.ImageEditParams, (EditImage,)),
    "POST /audio/transcriptions": (
        audio.transcription_create_params.TranscriptionCreateParams,
        (CreateTranscription,),
    ),
    "POST /embeddings": (types.EmbeddingCreateParams, (EmbeddingRequest,)),
    "POST /completions": (types.completion_create_params.CompletionCreateParams, (CreateCompletion,)),
    "POST /chat/completions": (chat.completion_create_params.CompletionCreateParams, (CreateChatCompletion,)),
}
"""The SDK's parameters of each route that takes any, and the models that read its body and its query."""
PATH_AND_FORM: Final = frozenset(
    {"project_id", "conversation_id", "vector_store_id", "session_id", "subagent_id", "vault_id"}
    | {"file", "files", "data", "image", "mask", "Idempotency-Key"}
)
"""Parameters that the SDK puts into the path or a header, or that are files of a form."""


def is_listed(gap: Gap) -> bool:
    """A row of the table is about the field, or about the type that an object of it has."""
    if gap.is_type and gap.value in UNSUPPORTED_TYPES:
        return True
    return any(
        row.field == gap.field and gap.model in row.models and row.value in (None, gap.value) for row in FIELD_ROWS
    )


@pytest.mark.parametrize("route", PAIRS)
def test_every_field_of_the_sdk_is_read_or_listed(route: str) -> None:
    """The next release of the SDK shows here what is new."""
    params, models = PAIRS[route]
    unread = {gap for gap in find_gaps(params, *models) if gap.field not in PATH_AND_FORM}
    assert sorted(map(str, filter(lambda gap: not is_listed(gap), unread))) == []


def test_every_field_of_the_beta_of_responses_is_read_or_listed() -> None:
    """The beta has the path of responses. `betas` is a header, and `agent` names an agent of a response of several."""
    gaps = find_gaps(beta.response_create_params.ResponseCreateParams, CreateResponse)
    unread = {gap for gap in gaps if gap.field not in ("agent", "openai-beta")}
    assert sorted(map(str, filter(lambda gap: not is_listed(gap), unread))) == []


def test_every_route_with_parameters_is_compared() -> None:
    routes = {
        f"{route.method} {route.path}" for route in API_ROUTES if route.body or route.query or route.form is not None
    }
    assert routes == set(PAIRS)


def test_every_resource_of_the_sdk_has_a_route_or_a_reason() -> None:
    """G24, the table "Routes without an answer": the next release of the SDK shows here what is new."""
    sources = Path(str(resources.__file__)).parent.rglob("*.py")
    paths = {path for file in sources for path in re.findall(r"[\"(f]/([a-z_]{2,})", file.read_text("utf-8"))}
    served = {route.path.split("/")[1] for route in API_ROUTES}
    assert {"responses", "batches", "organization"} <= paths
    assert paths - served - ABSENT_RESOURCES.keys() == set()
    assert served & ABSENT_RESOURCES.keys() == set()


def test_every_row_is_about_a_field_of_a_request_model() -> None:
    """A row whose model was renamed would refuse nothing."""
    names = {model.__name__ for _, models in PAIRS.values() for root in models for model in list_models(root)}
    assert {model for row in FIELD_ROWS for model in row.models} <= names


def test_a_field_that_is_not_known_is_a_gap() -> None:
    class Known(BaseModel):
        model: str

    gaps = find_gaps(types.EmbeddingCreateParams, Known)
    assert Gap("Known", "input") in gaps
    assert Gap("Known", "model") not in gaps
