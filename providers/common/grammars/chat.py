"""The grammars and schemas of a chat: checked before any engine or inference server sees them."""

from collections.abc import Iterator

from apis.chat import ChatCustomTool, ChatFunctionTool, ChatGrammarFormat, ChatJsonSchemaFormat, ChatRequest
from apis.errors import InvalidRequest
from providers.common.grammars.checks import check_grammars
from providers.common.grammars.schema_values import InvalidSchema, SchemaObject
from providers.common.grammars.schemas import check_references


async def check_chat(request: ChatRequest, tenant: str) -> None:
    """Raise InvalidRequest naming the field of a grammar that does not compile, or of a schema that refers too far.
    The engine judges the rest of a schema."""
    for param, code, schema in _find_schemas(request):
        try:
            check_references(schema)
        except InvalidSchema as exc:
            raise InvalidRequest(f"The schema is not valid: {exc}", param=param, code=code) from None
    grammars = [
        (f"tools[{at}].custom.format.grammar.definition", form.grammar)
        for at, tool in enumerate(request.tools or ())
        if isinstance(tool, ChatCustomTool) and isinstance(form := tool.custom.format, ChatGrammarFormat)
    ]
    await check_grammars(grammars, tenant)


def _find_schemas(request: ChatRequest) -> Iterator[tuple[str, str, SchemaObject]]:
    for at, tool in enumerate(request.tools or ()):
        if isinstance(tool, ChatFunctionTool) and tool.function.parameters is not None:
            yield f"tools[{at}].function.parameters", "invalid_function_parameters", tool.function.parameters
    if isinstance(form := request.response_format, ChatJsonSchemaFormat):
        yield "response_format.json_schema.schema", "invalid_json_schema", form.json_schema.schema_
