"""The table of fields: each row that refuses does so in the model that it names."""

import pytest
from pydantic import ValidationError

from apis.accounts.directory import CreateProject, UpdateProject, UpdateServiceAccount
from apis.accounts.project_settings import UpdateDataRetention, UpdateServiceTierSettings
from apis.accounts.requests import (
    CostsQuery,
    FileSearchUsageQuery,
    ImagesUsageQuery,
    UpdateRateLimit,
    UsageQuery,
    WebSearchUsageQuery,
)
from apis.agents.agents import CreateAgent, UpdateAgent
from apis.agents.environments import CreateEnvironment, CreateTemplate, UpdateTemplate
from apis.agents.sessions import CreateSession, UpdateSession
from apis.batches.batches import CreateBatch
from apis.errors import InvalidRequest, Unsupported
from apis.images import CreateImage, EditImage
from apis.responses import CreateResponse
from apis.transcription import CreateTranscription
from apis.wire.base import REFUSED_FIELD, Wire
from apis.wire.field_rows import FIELD_ROWS, FieldRow
from stack.http.parsing import validate_request
from stack.http.routes.chat import CreateChatCompletion
from tests.support.sdk.param_types import list_models

ROOTS = (
    CreateResponse,
    CreateChatCompletion,
    CreateBatch,
    CreateProject,
    UpdateProject,
    UpdateServiceAccount,
    UpdateRateLimit,
    UsageQuery,
    UpdateDataRetention,
    UpdateServiceTierSettings,
    ImagesUsageQuery,
    WebSearchUsageQuery,
    FileSearchUsageQuery,
    CostsQuery,
    CreateImage,
    EditImage,
    CreateTranscription,
    CreateAgent,
    UpdateAgent,
    CreateSession,
    UpdateSession,
    CreateEnvironment,
    CreateTemplate,
    UpdateTemplate,
)
MODELS = {model.__name__: model for root in ROOTS for model in list_models(root)}
WHOLE_FIELDS = [row for row in FIELD_ROWS if row.handling in ("refused", "moved") and row.value is None]
VALUES = [row for row in FIELD_ROWS if row.handling == "refused" and row.value is not None]


def name_of(row: FieldRow) -> str:
    return f"{row.models[0]}-{row.path}-{row.value}"


@pytest.mark.parametrize("row", WHOLE_FIELDS, ids=name_of)
def test_a_refused_field_is_an_error_of_every_model_that_would_have_it(row: FieldRow) -> None:
    """No such field is dropped."""
    for name in row.models:
        with pytest.raises(ValidationError) as caught:
            MODELS[name].model_validate({row.field: {"x": 1}})
        assert caught.value.errors()[0]["type"] == REFUSED_FIELD


@pytest.mark.parametrize("row", WHOLE_FIELDS, ids=name_of)
def test_null_and_the_values_that_ask_for_nothing_are_accepted(row: FieldRow) -> None:
    for name in row.models:
        for value in (None, *row.accepted):
            with pytest.raises(ValidationError) as caught:
                MODELS[name].model_validate(
                    {
                        "type": 0,
                        "model": 0,
                        "input": 0,
                        "role": 0,
                        "name": 0,
                        "python": 0,
                        "max_tokens_per_1_day": "",
                        row.field: value,
                    }
                )
            assert REFUSED_FIELD not in {error["type"] for error in caught.value.errors()}


@pytest.mark.parametrize("row", VALUES, ids=name_of)
def test_a_refused_value_is_an_error(row: FieldRow) -> None:
    value = [{"type": row.value}] if row.path.endswith("[]") else row.value
    for name in row.models:
        with pytest.raises(ValidationError) as caught:
            MODELS[name].model_validate({row.field: value})
        assert any(error["loc"][:1] == (row.field,) for error in caught.value.errors())


def test_a_field_below_the_top_is_named_by_its_path() -> None:
    fields = {"model": "m", "tools": [{"type": "function", "name": "f", "allowed_callers": ["programmatic"]}]}
    with pytest.raises(Unsupported, match="only 'direct' is possible") as caught:
        validate_request(fields, CreateResponse)
    assert caught.value.param == "tools[0].allowed_callers"


def test_the_words_of_a_validator_are_passed_on() -> None:
    """The error says what a domain is."""
    tool = {"type": "web_search", "filters": {"allowed_domains": ["https://example.com/a"]}}
    with pytest.raises(InvalidRequest, match="without https:// and without a path") as caught:
        validate_request({"model": "m", "tools": [tool]}, CreateResponse)
    assert caught.value.param == "tools[0].filters.allowed_domains[0]"


def test_a_model_without_refused_fields_has_no_check() -> None:
    class Plain(Wire):
        name: str

    assert not hasattr(Plain, "refuse_fields")
