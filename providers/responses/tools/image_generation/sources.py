"""The images of a conversation that a model may name to have them edited."""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from typing import Final

from apis.documents.reader import Reader
from apis.errors import StackError, ToolFailed
from apis.image_generator import MAX_SOURCE_BYTES, MAX_SOURCE_IMAGES, SourceImage
from apis.wire.item_parts import InputImage
from apis.wire.tool_items import ImageGenerationCallItem
from providers.responses.item_index import ItemIndex
from providers.responses.store.url_files import decode_fetched_file, file_parts

NEWEST: Final = "newest"
"""Name of the newest image of the conversation, for models that copy no ids."""
_INPUT_PREFIX: Final = "input_"
_MAX_LISTED: Final = 20


class SourceImages:
    """The images of one conversation, by the names that the model has for them: the id of the call that generated one,
    and `input_1`, `input_2`, ... for the others in their order."""

    def __init__(self, items: ItemIndex, reader: Reader, *, max_bytes: int, tenant: str) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self._tenant = tenant
        self._images: dict[str, InputImage | str] = {}
        input_count = 0
        for position in sorted((*items.positions(ImageGenerationCallItem), *items.file_positions())):
            item = items.items[position]
            if isinstance(item, ImageGenerationCallItem):
                if item.id and item.result:
                    self._images[item.id] = item.result
                continue
            for part, _ in file_parts(item):
                if isinstance(part, InputImage):
                    input_count += 1
                    self._images[f"{_INPUT_PREFIX}{input_count}"] = part

    def add_generated(self, item_id: str, base64_data: str) -> None:
        """Add the image that a call of this response generated."""
        self._images[item_id] = base64_data

    @property
    def newest_name(self) -> str | None:
        """The name of the newest image; None where the conversation has none."""
        return next(reversed(self._images), None)

    async def load(self, names: Sequence[str]) -> list[SourceImage]:
        """Return the images of these names. Raises ToolFailed for a name that no image has, for too many, and for an
        image that cannot be loaded."""
        if len(names) > MAX_SOURCE_IMAGES:
            raise ToolFailed(f"At most {MAX_SOURCE_IMAGES} images can be edited together.")
        images: list[SourceImage] = []
        for name in dict.fromkeys(names):
            image = self._images.get(self.newest_name or "" if name == NEWEST else name)
            if image is None:
                listed = ", ".join([*self._images][-_MAX_LISTED:]) or "none"
                raise ToolFailed(f"There is no image '{name[:100]}'. The images of this conversation: {listed}.")
            try:
                images.append(await self._load_image(image))
            except StackError as exc:
                raise ToolFailed(f"The image '{name[:100]}' cannot be edited: {exc.message}") from exc
            if sum(len(loaded.data) for loaded in images) > MAX_SOURCE_BYTES:
                raise ToolFailed(f"Images of {MAX_SOURCE_BYTES} bytes at most can be edited together.")
        return images

    async def _load_image(self, image: InputImage | str) -> SourceImage:
        if isinstance(image, str):
            return await asyncio.to_thread(_decode_image, image, self._max_bytes)
        return await load_image(image, self._reader, max_bytes=self._max_bytes, tenant=self._tenant)


async def load_image(part: InputImage, reader: Reader, *, max_bytes: int, tenant: str) -> SourceImage:
    """Return the image that a part names by data, URL or file id. Raises StackError where there is none."""
    if part.file_id:
        data = (await reader.load_upload(part.file_id, tenant=tenant)).data
    elif (part.image_url or "").startswith("data:"):
        return await asyncio.to_thread(_decode_image, (part.image_url or "").partition(",")[2], max_bytes)
    else:
        fetched = await asyncio.to_thread(decode_fetched_file, part)
        data = (fetched or await reader.fetch_file(part.image_url or "")).data
    return await asyncio.to_thread(SourceImage.check, data, max_bytes)


def _decode_image(base64_data: str, max_bytes: int) -> SourceImage:
    try:
        data = base64.b64decode(base64_data, validate=True)
    except (binascii.Error, ValueError):
        raise ToolFailed("its data is not base64.") from None
    return SourceImage.check(data, max_bytes)
