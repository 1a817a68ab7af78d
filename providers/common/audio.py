"""Audio in the messages of a request: checked before a model is asked, so that an error names its place."""

import binascii
from collections.abc import Collection, Mapping

from apis.errors import InvalidRequest, Unsupported
from apis.inference import Modality


def require_base64_audio(audio: Mapping[str, str]) -> None:
    """Raise InvalidRequest for the first of these texts that is no base64, by its place in the request."""
    for place, data in audio.items():
        try:
            binascii.a2b_base64(data, strict_mode=True)
        except (binascii.Error, ValueError):
            param = f"{place}.input_audio.data"
            raise InvalidRequest(f"Invalid '{param}': it is not base64.", param=param, code="invalid_value") from None


def require_hearing(modalities: Collection[Modality] | None, place: str) -> None:
    """Raise Unsupported, naming the place of the audio, for a model that is known to take none."""
    if modalities is not None and "audio" not in modalities:
        raise Unsupported(
            "This model takes no audio. The models of /v1/audio/transcriptions write it down as text.", param=place
        )
