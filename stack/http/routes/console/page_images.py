"""Extensions of OpenAI's API: pictures of the pages of a PDF, which is stored or sent with the request."""

import asyncio
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from apis.documents.page_images import CreatePageImages, PageImagesParams
from apis.documents.reader import Document, PageImages, Reader, decode_file_data, image_to_url
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.request_body import read_model, read_query
from stack.http.route import FILES, RESPONSES, Route


async def get_page_images(http: Request, context: HttpContext, services: Services) -> Response:
    params, reader = read_query(http, PageImagesParams), _require_reader(services)
    document = await reader.load_upload(http.path_params["file_id"], tenant=context.tenant)
    return value_response(await _render(reader, document, params, context.tenant))


async def create_page_images(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreatePageImages)
    reader = _require_reader(services)
    document = await asyncio.to_thread(decode_file_data, request.file_data)
    return value_response(await _render(reader, document, request, context.tenant))


PAGE_IMAGE_ROUTES: Final = (
    Route("GET", "/files/{file_id}/page_images", FILES, get_page_images, query=PageImagesParams),
    Route("POST", "/stack/page_images", RESPONSES, create_page_images, body=CreatePageImages, stores=False),
)


def _require_reader(services: Services) -> Reader:
    return require_section(services.stack.reader, "reads no files", "reader")


async def _render(reader: Reader, document: Document, params: PageImagesParams, tenant: str) -> dict[str, Any]:
    images = await reader.render_pages(document, params, tenant=tenant)
    return await asyncio.to_thread(_images_to_json, images, params.first)


def _images_to_json(images: PageImages, first: int) -> dict[str, Any]:
    data = [
        {
            "object": "stack.page_image",
            "page": number,
            "width": page.width,
            "height": page.height,
            "image_url": image_to_url(page.png),
        }
        for number, page in enumerate(images.pages, start=first)
    ]
    return {"object": "list", "data": data, "page_count": images.page_count}
