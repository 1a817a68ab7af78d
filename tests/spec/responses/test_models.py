"""The models a stack serves, as clients list them."""

from typing import Any

import pytest
from openai import NotFoundError

from tests.support.servers.serving import serving

SCRIPTED = {"provider": "scripted"}
ROUTER: dict[str, Any] = {
    "provider": "router",
    "providers": {"a": {**SCRIPTED, "model": "one"}, "b": {**SCRIPTED, "model": "org/two"}},
}


async def test_all_models_are_listed() -> None:
    async with serving(ROUTER) as served:
        page = await served.client.models.list()
    assert page.object == "list"
    assert sorted(model.id for model in page.data) == ["one", "org/two"]
    assert {model.object for model in page.data} == {"model"}


@pytest.mark.parametrize("model_id", ["one", "org/two"])
async def test_a_model_is_found_by_its_id_and_answers_by_it(model_id: str) -> None:
    async with serving(ROUTER) as served:
        assert (await served.client.models.retrieve(model_id)).id == model_id
        response = await served.client.responses.create(model=model_id, input="hi")
    assert response.model == model_id


async def test_an_unknown_model_is_not_found() -> None:
    async with serving(ROUTER) as served:
        with pytest.raises(NotFoundError) as caught:
            await served.client.models.retrieve("three")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_the_error_of_an_unknown_model_names_those_that_exist() -> None:
    """A beginner sends the name of an example."""
    async with serving() as served:
        for ask in (
            served.client.responses.create(model="gpt-5", input="Hi"),
            served.client.models.retrieve("gpt-5"),
        ):
            with pytest.raises(NotFoundError, match=r"The model 'gpt-5' does not exist\. This server has: scripted\."):
                await ask
