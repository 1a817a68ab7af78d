"""The error of the program that extracts text."""


class ExtractionError(Exception):
    """The file has no readable text. `code` is one of the API's error codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
