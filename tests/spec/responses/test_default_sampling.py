"""The sampling of a model without a request's own is what its response says."""

from apis.inference import DefaultSampling
from providers.inference.scripted import Scripted
from tests.support.sdk.requests import create, stream
from tests.support.servers.serving import scripted, serving


class Cool(Scripted):
    """A scripted model with a sampling of its own."""

    class Config(Scripted.Config):
        pass

    async def default_sampling(self, model: str) -> DefaultSampling:
        return DefaultSampling(0.25, 0.5)


COOL = {**scripted([{"text": "Hi."}], [{"text": "Hi."}]), "provider": "tests.spec.responses.test_default_sampling:Cool"}


async def test_defaults_of_the_model_are_echoed() -> None:
    """Also through the router, and in the stored response."""
    for section in (COOL, {"provider": "router", "providers": {"a": COOL}}):
        async with serving(section) as served:
            response = await create(served)
            assert (response.temperature, response.top_p) == (0.25, 0.5)
            stored = await served.client.responses.retrieve(response.id)
            assert (stored.temperature, stored.top_p) == (0.25, 0.5)
            ended = (await stream(served, temperature=1.5))[-1].response
            assert (ended.temperature, ended.top_p) == (1.5, 0.5)


async def test_what_only_the_models_server_knows_is_the_apis_default() -> None:
    async with serving() as served:
        response = await create(served)
    assert (response.temperature, response.top_p) == (1.0, 1.0)
