"""The fields, types and values of OpenAI's API that no request model uses: what this server does with each.

`Wire` refuses by these rows, apis/docs/fields.md lists them, and a test compares them with the openai SDK's own types,
so that every field that the SDK can send is read by a request model or stands here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Handling = Literal["refused", "moved", "ignored", "echoed"]
"""`refused`: an error that names the field. `moved`: an error that names the new field. `ignored`: accepted without an
effect. `echoed`: without an effect here, and returned as it was sent."""


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of the API, by its path in the request, and the request models that would have it."""

    path: str
    models: tuple[str, ...]
    handling: Handling
    note: str
    """The reason, as a sentence for the reader of an error and of the documentation; the new path of a moved field."""
    accepted: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing but what this server does anyway."""
    value: str | None = None
    """The one value of the field that the row is about; None for all of them."""

    @property
    def field(self) -> str:
        """The name of the field within its object."""
        return self.path.rpartition(".")[2].removesuffix("[]")


_RESPONSE = ("CreateResponse",)
_CHAT = ("CreateChatCompletion",)
_TOOLS = (
    *("FunctionTool", "CustomTool", "McpTool", "CodeInterpreterTool", "ShellTool", "ApplyPatchTool"),
    *("LoadedFunctionTool", "LoadedCustomTool", "LoadedMcpTool"),
)
_CALLED_BY = (
    *("FunctionCallItem", "FunctionCallOutput", "CustomToolCallItem", "CustomToolCallOutput", "ShellCallItem"),
    *("ShellCallOutput", "ApplyPatchCallItem", "ApplyPatchCallOutput"),
)
_ONE_AGENT = "A response has one agent: run several in your client."
_IMAGES = ("CreateImage", "EditImage")
_NO_SVG = "An SVG is text: ask the model itself for it."
_NO_USERS = "Usage is by project, key and model: there are no users here."
_USAGE = ("UsageQuery", "ImagesUsageQuery", "WebSearchUsageQuery", "FileSearchUsageQuery")
_PLAIN_IMAGES = "Images are counted by project, key and model."
_AGENTS = ("CreateAgent", "UpdateAgent", "SessionAgent")
_NO_ENVIRONMENT = "An MCP server is reached from this server: give its URL."
_HOSTED = ("NewEnvironment", "HostedEnvironment", "CreateTemplate", "UpdateTemplate")
_ONE_LEVEL = "All searches here are of one level."
_SEVERAL_STORES = "A search may be of several stores."
_PROJECTS = ("CreateProject", "UpdateProject")
_CHAT_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "include",
}

FIELD_ROWS: Final = (
    *(FieldRow(old, _RESPONSE, "moved", new, (False,)) for old, new in _CHAT_NAMES.items()),
    FieldRow("n", _RESPONSE, "refused", "A response is one answer.", (1,)),
    FieldRow("modalities", _RESPONSE, "refused", "The models here write text.", (["text"],)),
    FieldRow("audio", _RESPONSE, "refused", "The models here write text."),
    FieldRow("web_search_options", _RESPONSE, "refused", "Declare the tool 'web_search' in 'tools'."),
    FieldRow("multi_agent", _RESPONSE, "refused", _ONE_AGENT, ({"enabled": False},)),
    FieldRow("personality", ("CountInputTokens",), "ignored", "It belongs to OpenAI's own models."),
    FieldRow("safety_identifier", _RESPONSE, "echoed", "No request is checked by user."),
    FieldRow("user", _RESPONSE, "echoed", "No request is checked by user."),
    FieldRow("prompt_cache_retention", _RESPONSE, "echoed", "The engine decides how long it caches."),
    FieldRow("prompt_cache_options.mode", ("PromptCacheOptions",), "echoed", "The engine caches every prefix itself."),
    FieldRow("prompt_cache_options.ttl", ("PromptCacheOptions",), "echoed", "The engine decides how long it caches."),
    *(
        FieldRow(
            "access_programs.cyber", ("AccessPrograms",), "refused", "There are no access programs here.", value=value
        )
        for value in ("daybreak_blue", "daybreak_red")
    ),
    FieldRow(
        "background_options.continuation_id", ("BackgroundOptions",), "ignored", "Requests are not ranked by relation."
    ),
    FieldRow(
        "image.context_compression",
        ("ImageOptions",),
        "refused",
        "Images reach the model uncompressed.",
        value="enabled",
    ),
    FieldRow("reasoning.mode", ("ReasoningOptions",), "refused", "The only mode here is 'standard'.", value="pro"),
    FieldRow(
        "reasoning.generate_summary", ("ReasoningOptions",), "ignored", "It is the old name of 'reasoning.summary'."
    ),
    FieldRow(
        "tools[].allowed_callers",
        _TOOLS,
        "refused",
        "Programs cannot call tools here: only 'direct' is possible.",
        (["direct"],),
    ),
    FieldRow(
        "tools[].async",
        ("FunctionTool", "CustomTool", "LoadedFunctionTool", "LoadedCustomTool"),
        "echoed",
        "The model goes on, and the output of a call may come with a later request.",
    ),
    FieldRow(
        "tools[].output_schema",
        ("FunctionTool", "LoadedFunctionTool"),
        "echoed",
        "Models here read the output as text.",
    ),
    FieldRow("tools[].output_format", ("ImageGenerationTool",), "refused", _NO_SVG, value="svg"),
    FieldRow("tools[].svg", ("ImageGenerationTool",), "refused", _NO_SVG),
    FieldRow("tools[].search_content_types", ("WebSearchTool",), "echoed", "Searches here return text."),
    FieldRow("input[].caller", _CALLED_BY, "echoed", "Programs cannot call tools here."),
    FieldRow("input[].async", ("FunctionCallItem", "CustomToolCallItem"), "echoed", "The output may come later."),
    *(
        FieldRow(
            f"input[].{name}", ("ImageGenerationCallItem",), "echoed", "A model reads the prompt and sees the image."
        )
        for name in ("action", "background", "error", "output_format", "quality", "size", "svg_usage")
    ),
    FieldRow("input[].environment.skills", ("ShellCallEnvironment",), "echoed", "The call has ended."),
    *(
        FieldRow(f"input[].content[].{name}", ("OutputText",), "echoed", "A model reads the text only.")
        for name in ("annotations", "logprobs")
    ),
    FieldRow("input[].content[].detail", ("InputFile",), "echoed", "The reader decides how it reads a file."),
    FieldRow(
        "input[].content[].prompt_cache_breakpoint",
        ("InputText", "InputImage", "InputFile"),
        "echoed",
        "The engine caches every prefix itself.",
    ),
    *(
        FieldRow(f"input[].action.{name}", ("WebSearchAction",), "echoed", "A model reads the result of the call.")
        for name in ("pattern", "queries", "query", "sources", "url")
    ),
    FieldRow("input[].results[].attributes", ("FileSearchResult",), "echoed", "A model reads the text only."),
    FieldRow("input[].tools[].annotations", ("ListedTool",), "echoed", "The server's own list decides."),
    *(
        FieldRow(
            "input[].tools[]",
            ("ToolSearchOutput",),
            "refused",
            "A search returns functions, custom tools, namespaces and MCP servers.",
            value=value,
        )
        for value in (
            *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"),
            *("local_shell", "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
            "web_search_preview_2025_03_11",
        )
    ),
    *(
        FieldRow(
            "input[].content[]", ("AssistantMessage",), "refused", "A message of the model holds text.", value=value
        )
        for value in ("input_file", "input_image")
    ),
    *(
        FieldRow(name, ("CompactConversation",), "ignored", "Only the text of the summary depends on the request.")
        for name in ("image", "prompt_cache_options", "prompt_cache_retention", "service_tier")
    ),
    FieldRow("functions", _CHAT, "moved", "tools"),
    FieldRow("function_call", _CHAT, "moved", "tool_choice"),
    FieldRow("store", _CHAT, "refused", "Chat completions are not stored here: use responses.", (False,)),
    FieldRow("audio", _CHAT, "refused", "The models here write text."),
    FieldRow("modalities", _CHAT, "refused", "The models here write text.", (["text"],)),
    FieldRow("web_search_options", _CHAT, "refused", "Searches are a tool of responses."),
    FieldRow("prediction", _CHAT, "ignored", "It changes the speed only, and no engine here uses it."),
    FieldRow("metadata", _CHAT, "ignored", "Only a stored completion would have it."),
    *(
        FieldRow(name, _CHAT, "ignored", "A completion has no field for it.")
        for name in ("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "user")
    ),
    FieldRow("stream_options.include_obfuscation", ("ChatStreamOptions",), "ignored", "Chunks are never padded."),
    FieldRow("messages[].audio", ("Message",), "refused", "The models here write text."),
    FieldRow("messages[].function_call", ("Message",), "moved", "messages[].tool_calls"),
    FieldRow("messages[].role", ("Message",), "refused", "Use the role 'tool'.", value="function"),
    FieldRow(
        "messages[].content[].prompt_cache_breakpoint",
        ("TextPart", "ImagePart", "FilePart", "AudioPart"),
        "ignored",
        "The engine caches every prefix itself.",
    ),
    FieldRow("prompt_cache_options", ("CreateDecision",), "ignored", "The engine caches every prefix itself."),
    FieldRow(
        "input[].content[].prompt_cache_breakpoint",
        ("DecisionText", "DecisionImage"),
        "ignored",
        "The engine caches every prefix itself.",
    ),
    FieldRow("safety_identifier", ("CreateDecision",), "ignored", "No request is checked by user."),
    FieldRow("output_format", _IMAGES, "refused", _NO_SVG, value="svg"),
    FieldRow("svg", _IMAGES, "refused", _NO_SVG),
    FieldRow("response_format", _IMAGES, "refused", "Images are not stored: they come in the response.", value="url"),
    *(
        FieldRow("quality", _IMAGES, "refused", "It is a quality of retired models.", value=value)
        for value in ("standard", "hd")
    ),
    FieldRow("style", _IMAGES, "refused", "Describe the style in the prompt."),
    FieldRow("markup", ("EditImage",), "refused", "Describe the change in the prompt, or send a mask."),
    *(FieldRow(name, _IMAGES, "ignored", "No request is checked by user.") for name in ("safety_identifier", "user")),
    *(
        FieldRow(name, ("CreateTranscription",), "refused", "No server of open models takes it.")
        for name in ("include", "keywords", "languages", "known_speaker_names", "known_speaker_references")
    ),
    FieldRow("chunking_strategy", ("CreateTranscription",), "refused", "The model's server cuts the audio.", ("auto",)),
    FieldRow(
        "response_format",
        ("CreateTranscription",),
        "refused",
        "Transcripts here name no speakers.",
        value="diarized_json",
    ),
    FieldRow("rewrite_query", ("SearchStores",), "ignored", "Queries are searched for as they are."),
    FieldRow("user", ("EmbeddingRequest", "CreateCompletion"), "ignored", "No request is checked by user."),
    *(
        FieldRow(
            "endpoint",
            ("CreateBatch",),
            "refused",
            "A batch is of responses, chat completions, completions or embeddings.",
            value=value,
        )
        for value in ("/v1/moderations", "/v1/images/generations", "/v1/images/edits", "/v1/videos")
    ),
    FieldRow("external_key_id", _PROJECTS, "refused", "What is stored is encrypted by the store's own means."),
    FieldRow("geography", _PROJECTS, "refused", "All that is stored lies in the store of this server."),
    FieldRow("residency", ("CreateProject",), "refused", "All that is stored lies in the store of this server."),
    *(
        FieldRow(name, ("UpdateRateLimit",), "refused", "Limits here are of requests and tokens.")
        for name in ("batch_1_day_max_input_tokens", "max_audio_megabytes_per_1_minute", "max_images_per_1_minute")
    ),
    FieldRow("user_ids", _USAGE, "refused", _NO_USERS),
    *(
        FieldRow("group_by", (*_USAGE, "CostsQuery"), "refused", _NO_USERS, value=value)
        for value in ("user_id", "api_source")
    ),
    *(FieldRow(name, ("ImagesUsageQuery",), "refused", _PLAIN_IMAGES) for name in ("sizes", "sources")),
    *(
        FieldRow("group_by", ("ImagesUsageQuery",), "refused", _PLAIN_IMAGES, value=value)
        for value in ("size", "source")
    ),
    FieldRow("context_levels", ("WebSearchUsageQuery",), "refused", _ONE_LEVEL),
    FieldRow("group_by", ("WebSearchUsageQuery",), "refused", _ONE_LEVEL, value="context_level"),
    FieldRow("vector_store_ids", ("FileSearchUsageQuery",), "refused", _SEVERAL_STORES),
    FieldRow("group_by", ("FileSearchUsageQuery",), "refused", _SEVERAL_STORES, value="vector_store_id"),
    FieldRow("bucket_width", _USAGE, "refused", "The finest sums are those of hours.", value="1m"),
    *(
        FieldRow("retention_type", ("UpdateDataRetention",), "refused", "No abuse is monitored here.", value=value)
        for value in (
            *("modified_abuse_monitoring", "enhanced_zero_data_retention"),
            "enhanced_modified_abuse_monitoring",
        )
    ),
    FieldRow(
        "default", ("UpdateServiceTierSettings",), "refused", "No capacity is reserved in advance here.", value="scale"
    ),
    FieldRow("experimental", _AGENTS, "refused", "Say the time in a message.", ({}, {"time_awareness": False})),
    FieldRow("compaction", _AGENTS, "echoed", "A conversation is compacted at four fifths of its model's window."),
    FieldRow("tools[].async", ("AgentFunction",), "refused", "A turn waits for the results of its calls.", (False,)),
    FieldRow("tools[].request_metadata", ("AgentMcp",), "refused", "Send headers instead.", ({},)),
    FieldRow("tools[].required", ("AgentMcp",), "echoed", "A turn fails without the tools of its servers."),
    FieldRow("tools[].connection_origin", ("AgentMcp",), "refused", _NO_ENVIRONMENT, value="environment"),
    FieldRow("agent.tools[].connection_origin", ("AgentMcp",), "refused", _NO_ENVIRONMENT, value="environment"),
    FieldRow("desktop", _HOSTED, "refused", "Environments here have no desktop.", ({"enabled": False},)),
    FieldRow("plugins", _HOSTED, "refused", "Bring skills instead.", ([],)),
    FieldRow("capability_directories", _HOSTED, "refused", "Bring skills instead.", ([],)),
    FieldRow(
        "container_size", ("HostedEnvironment",), "refused", "All environments have the size of the run config's tools."
    ),
    FieldRow("network.blocked_domains", ("EnvironmentNetwork",), "refused", "Name the allowed domains.", ([],)),
    FieldRow("packages.system", ("EnvironmentPackages",), "refused", "No program is root in a sandbox.", ([],)),
    *(
        FieldRow("review", (name,), "refused", "Answer the approvals in your client.", value="auto_review")
        for name in ("CreateSession", "UpdateSession")
    ),
    FieldRow("prompt_cache_options.ttl", ("CacheOptions",), "echoed", "The engine decides how long it caches."),
    FieldRow("role", ("UpdateServiceAccount",), "refused", "Scopes of a key are its rights.", ("member",)),
)

_NO_PROGRAMS: Final = "Programs cannot call tools here."
UNSUPPORTED_TYPES: Final[Mapping[str, str]] = {
    "programmatic_tool_calling": _NO_PROGRAMS,
    "program": _NO_PROGRAMS,
    "program_output": _NO_PROGRAMS,
    "agent_message": _ONE_AGENT,
    "multi_agent_call": _ONE_AGENT,
    "multi_agent_call_output": _ONE_AGENT,
    "self_hosted": "Commands run in environments of this server: use 'openai_hosted'.",
    "stdio": "A server of MCP is reached by its URL: no program of a request is started here.",
    "computer_use": "Agents here have no browser.",
    "automations": "An agent cannot schedule work itself: create an automation.",
    "agent.session.input.computer_use_approval_request_result": "Agents here have no browser.",
    "input_audio": "Audio is a part of messages only.",
}
"""Types of tools, tool choices, items, parts and environments that are refused by name, each with the reason."""
_PART_NAMES: Final = {"text": "input_text", "image_url": "input_image", "file": "input_file"}
OTHER_TYPE_NAMES: Final[Mapping[str, str]] = {**_PART_NAMES, **{new: old for old, new in _PART_NAMES.items()}}
"""Types of content parts in chat completions by those in responses, and the reverse."""


def refused_fields(model_names: Iterable[str]) -> dict[str, FieldRow]:
    """Return the rows, by field, that refuse a whole field of one of these models."""
    names = frozenset(model_names)
    return {
        row.field: row
        for row in FIELD_ROWS
        if row.handling in ("refused", "moved") and row.value is None and not names.isdisjoint(row.models)
    }


def find_refused_value(path: str, value: object) -> FieldRow | None:
    """Return the row that refuses this value of the field at `path`, which has `[]` in place of indexes."""
    return next((row for row in FIELD_ROWS if row.path == path and row.value == value and row.value is not None), None)


def refusal_message(row: FieldRow, param: str) -> str:
    """Return the error of a field, or of one value of it, that is refused; `param` is its path in the request."""
    if row.value is not None:
        return f"Invalid '{param}': '{row.value}' is not offered by this server. {row.note}"
    if row.handling == "moved":
        api = "the Responses API" if "CreateResponse" in row.models else "this API"
        return f"Unsupported parameter: '{param}'. In {api}, this parameter has moved to '{row.note}'."
    values = f" with a value other than {' or '.join(map(repr, row.accepted))}" if row.accepted else ""
    return f"'{param}'{values} is not offered by this server. {row.note}"
