"""/v1/moderations: how likely texts and images are harmful, by the moderation of the run config."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.chat import ImagePart
from apis.moderation import ContentPart, CreateModeration, Moderation, ModerationScores
from stack.http.answers import value_response
from stack.http.chat_media import load_images, replace_url
from stack.http.context import HttpContext, Services, require_section
from stack.http.request_body import read_metered
from stack.http.route import RESPONSES, Route
from stack.http.streams import run_while_connected


async def create_moderation(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_metered(http, CreateModeration)
    moderation = require_section(services.stack.moderation, "moderates nothing", "moderation")
    if request.model is not None:
        moderation.require_name(request.model, "model")
    urls = await load_images(_find_images(request), services.stack.fetcher, "input")
    inputs = [
        [replace_url(part, urls) if isinstance(part, ImagePart) else part for part in parts]
        for parts in request.list_inputs()
    ]
    salt = services.cache_salts.salt_of(context.tenant)
    results = await run_while_connected(http, _judge_all(moderation, inputs, salt))
    total = results[0]
    for result in results[1:]:
        total = total.joined_with(result)
    context.request_record.record_usage(moderation.model, total.usage, category="moderations")
    fields = {"id": f"modr-{secrets.token_hex(16)}", "model": request.model or moderation.model}
    return value_response({**fields, "results": [result.to_json() for result in results]})


MODERATION_ROUTES: Final = (
    Route("POST", "/moderations", RESPONSES, create_moderation, body=CreateModeration, stores=False),
)


def _find_images(request: CreateModeration) -> Mapping[str, str]:
    """Return the place of each image by its URL."""
    entries = request.input if isinstance(request.input, list) else []
    return {
        entry.image_url.url: f"input[{at}].image_url.url"
        for at, entry in enumerate(entries)
        if not isinstance(entry, str) and entry.type == "image_url"
    }


async def _judge_all(
    moderation: Moderation, inputs: Sequence[Sequence[ContentPart]], cache_salt: str | None
) -> Sequence[ModerationScores]:
    results: list[ModerationScores] = []
    for at, parts in enumerate(inputs):
        param = "input" if len(inputs) == 1 else f"input[{at}]"
        results.append(await moderation.judge(parts, param=param, cache_salt=cache_salt))
    return results
