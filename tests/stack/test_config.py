"""The run config: what it may say, and the whole sentence that each mistake gets."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from apis.errors import ConfigError
from stack.config import StackConfig, find_config, is_loopback, load_config
from stack.server_config import HttpServerConfig
from stack.wiring import wire_providers

BODY = "inference: {provider: vllm}\nkv_store: {provider: memory}\n"


def load(tmp_path: Path, text: str | bytes, env: dict[str, str] | None = None, **server: object) -> StackConfig:
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(str(file), server=server, env=env or {})


def message(tmp_path: Path, text: str | bytes, env: dict[str, str] | None = None, **server: object) -> str:
    """Return the ConfigError's message without the file's name, which must begin each line."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, env, **server)
    lines = str(caught.value).splitlines()
    start = f"{tmp_path / 'run.yaml'}: "
    assert all(line.startswith(start) for line in lines)
    return "\n".join(line.removeprefix(start) for line in lines)


def test_a_small_config_has_the_loop_and_listens_to_this_machine_only(tmp_path: Path) -> None:
    config = load(tmp_path, BODY)
    assert (config.responses.provider, config.tool_runtime) == ("loop", None)
    assert (config.server.host, config.server.port, config.server.api_keys) == ("127.0.0.1", 8321, [])
    assert config.source == str(tmp_path / "run.yaml")


def test_a_sections_own_fields_are_kept_as_they_are_written(tmp_path: Path) -> None:
    config = load(tmp_path, "inference: {provider: vllm, base_url: [a, b], n: 3}\nkv_store: {provider: memory}\n")
    assert config.inference.fields == {"base_url": ["a", "b"], "n": 3}


def test_webhooks_of_an_earlier_version_are_read_from_the_section_responses(tmp_path: Path) -> None:
    old = "responses: {provider: loop, webhooks: [{url: a}], webhook_endpoints: {private: true}, max_turns: 3}\n"
    config = load(tmp_path, BODY + old)
    assert config.responses.fields == {"max_turns": 3}
    assert config.webhooks.fields == {"receivers": [{"url": "a"}], "endpoints": {"private": True}}
    twice = load(tmp_path, f"{BODY}{old}webhooks: {{provider: kv, receivers: []}}\n")
    with pytest.raises(ConfigError, match=r"responses\.webhooks: is not a known key"):
        wire_providers(twice)


def test_keys_are_plain_or_with_their_tenant_and_never_shown(tmp_path: Path) -> None:
    config = load(tmp_path, f"{BODY}server: {{api_keys: [sk-one, {{key: sk-two, tenant: b}}]}}\n")
    assert [(k.key.get_secret_value(), k.tenant) for k in config.server.api_keys] == [
        ("sk-one", "default"),
        ("sk-two", "b"),
    ]
    assert "sk-" not in repr(config)


def test_overrides_win_over_the_file_and_none_overrides_nothing(tmp_path: Path) -> None:
    config = load(tmp_path, f"{BODY}server: {{port: 1, log_level: debug}}\n", port=2, host=None)
    assert (config.server.port, config.server.host, config.server.log_level) == (2, "127.0.0.1", "debug")


@pytest.mark.parametrize(
    ("written", "env", "read"),
    [
        ("${env.A}", {"A": "x"}, "x"),
        ("${env.A:=d}", {"A": "x"}, "x"),
        ("${env.A:=d}", {}, "d"),
        ("${env.A:=d}", {"A": ""}, "d"),
        ("http://${env.A}:${env.B:=80}/v1", {"A": "h"}, "http://h:80/v1"),
        ("${env.A}", {"A": "${env.B}"}, "${env.B}"),
        ("${env.A:=a: b}", {}, "a: b"),
        ("$A", {"A": "x"}, "$A"),
    ],
)
def test_variables_are_replaced_once_in_text(tmp_path: Path, written: str, env: dict[str, str], read: str) -> None:
    config = load(tmp_path, f"inference: {{provider: vllm, x: '{written}'}}\nkv_store: {{provider: m}}\n", env)
    assert config.inference.fields == {"x": read}


@pytest.mark.parametrize("env", [{}, {"A": ""}])
def test_what_a_variable_leaves_empty_counts_as_not_written(tmp_path: Path, env: dict[str, str]) -> None:
    text = "inference: {provider: vllm, x: '${env.A:=}', y: ['${env.A:=}', z], e: ''}\nkv_store: {provider: m}\n"
    assert load(tmp_path, text, env).inference.fields == {"y": ["z"], "e": ""}


def test_a_variable_may_stand_for_a_number_or_a_truth(tmp_path: Path) -> None:
    text = f"{BODY}server: {{port: '${{env.P}}', dangerously_allow_unauthenticated: '${{env.D}}'}}\n"
    server = load(tmp_path, text, {"P": "99", "D": "true"}).server
    assert (server.port, server.dangerously_allow_unauthenticated) == (99, True)


def test_merged_defaults_may_be_overridden(tmp_path: Path) -> None:
    text = "inference: &i {provider: vllm, a: 1}\nkv_store: {<<: *i, a: 2}\n"
    assert load(tmp_path, text).kv_store.fields == {"a": 2}


DEEP = "inference: " + "{a: " * 40 + "1" + "}" * 40

MISTAKES: dict[str, tuple[str | bytes, str]] = {
    "no inference": ("kv_store: {provider: memory}", "inference: is required."),
    "no kv_store": ("inference: {provider: vllm}", "kv_store: is required."),
    "no provider": ("inference: {}\nkv_store: {provider: memory}", "inference.provider: is required."),
    "section of text": ("inference: vllm\nkv_store: {provider: m}", "inference: must be a mapping of keys to values."),
    "unknown api": (f"{BODY}tool_runtimes: {{}}", "tool_runtimes: is not a known key. Did you mean 'tool_runtime'?"),
    "nothing like it": (
        f"{BODY}zzz: 1",
        f"zzz: is not a known key. Known keys: {', '.join(sorted(StackConfig.model_fields))}.",
    ),
    "unknown server key": (f"{BODY}server: {{prot: 1}}", "server.prot: is not a known key. Did you mean 'port'?"),
    "unknown nested key": (
        f"{BODY}server: {{api_keys: [{{key: a, tennant: b}}]}}",
        "server.api_keys.0.tennant: is not a known key. Did you mean 'tenant'?",
    ),
    "two mistakes": (
        f"{BODY}server: {{port: 70000, log_level: loud}}",
        "server.port: Input should be less than or equal to 65535.\n"
        "server.log_level: must be 'debug', 'info', 'warning' or 'error'.",
    ),
    "key of another type": (
        f"{BODY}server: {{api_keys: [123]}}",
        "server.api_keys.0: must be a mapping of keys to values.",
    ),
    "key without text": (
        f"{BODY}server: {{api_keys: [{{tenant: a}}]}}",
        "server.api_keys.0.key: is required.",
    ),
    "same key twice": (
        f"{BODY}server: {{api_keys: [sk-a, {{key: sk-a, tenant: b}}]}}",
        "server.api_keys: holds the same key twice; give every tenant a key of its own.",
    ),
    "open to others": (
        f"{BODY}server: {{host: 0.0.0.0}}",
        "server: host 0.0.0.0 can be reached from other machines, and there are no api_keys. Add api_keys, or set "
        "host: 127.0.0.1, or, where something in front of the stack lets only the right callers in, set "
        "dangerously_allow_unauthenticated: true.",
    ),
    "unset variable": (
        "inference: {provider: vllm, urls: ['x${env.NOPE}']}\nkv_store: {provider: memory}",
        "inference.urls.0: the environment variable NOPE is not set. Set it, or write a default: ${env.NOPE:=value}.",
    ),
    "variable of another form": (
        "inference: {provider: vllm, x: '${NOPE}'}\nkv_store: {provider: memory}",
        "inference.x: a variable is written ${env.NAME} or ${env.NAME:=default}.",
    ),
    "key given twice": (
        "inference: {provider: a}\ninference: {provider: b}\n",
        "is not YAML that can be used: the key 'inference' is given twice at line 2, column 1.",
    ),
    "bad yaml": (
        "inference: [1\n",
        "is not YAML that can be used: expected ',' or ']', but got '<stream end>' at line 2, column 1.",
    ),
    "a tag": (
        "inference: !!python/object/apply:os.system [x]",
        "is not YAML that can be used: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.system' at line 1, column 12.",
    ),
    "control character": (
        "inference: \x07",
        'is not YAML that can be used: unacceptable character #x0007: special characters are not allowed in "<unicode '
        'string>", position 11.',
    ),
    "a date that is none": ("inference: 2026-99-99", "is not YAML that can be used: month must be in 1..12."),
    "many aliases": (
        "a: &a [1]\nb: [" + "*a, " * 33 + "]",
        "is not YAML that can be used: more than 32 aliases at line 2, column 133.",
    ),
    "an alias of itself": (
        "inference: &a {b: *a}",
        "inference.b.b...: is nested deeper than 32 levels.",
    ),
    "deep": (DEEP, "inference.a.a...: is nested deeper than 32 levels."),
    "very deep": ("[" * 5000, "is nested deeper than 32 levels."),
    "a key that is no text": ("inference: {1: 2}", "inference.1: the key is not text. Put it in quotes."),
    "not utf-8": (b"\xff\xfe", "is not UTF-8 text. Save it in that encoding."),
    "large": (b"#" * (1024 * 1024 + 1), "is larger than 1 MiB, which no run config is."),
    "a list": ("[1]", f"must be a mapping with the keys {', '.join(StackConfig.model_fields)}."),
}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_an_error_with_its_path_and_its_remedy(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert message(tmp_path, text) == expected


def test_an_empty_file_is_an_error_that_names_a_config_to_start_from(tmp_path: Path) -> None:
    error_text = message(tmp_path, "# nothing\n")
    assert error_text.startswith("is empty. Start from one of the files in ")
    assert error_text.endswith("configs.")


def test_a_host_given_on_the_command_line_needs_keys_too(tmp_path: Path) -> None:
    assert message(tmp_path, BODY, host="::").startswith("server: host :: can be reached from other machines")


def test_no_value_is_shown_with_an_error_for_it_may_be_a_secret(tmp_path: Path) -> None:
    text = f"{BODY}server: {{api_keys: [{{key: sk-secret, tenant: 'not/a tenant'}}], port: sk-other}}\n"
    error_text = message(tmp_path, text)
    assert "server.api_keys.0.tenant: String should match pattern" in error_text
    assert "server.port: Input should be a valid integer, unable to parse string as an integer." in error_text
    assert "sk-" not in error_text


def test_a_missing_file_is_an_error_with_the_packaged_names() -> None:
    with pytest.raises(ConfigError) as caught:
        find_config("nowhere.yaml")
    assert str(caught.value) == (
        "nowhere.yaml: no such file. Give a path, or one of the packaged configs: gpt-oss, local-tools, local, "
        "multi-provider, tools, vllm."
    )


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(BODY)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"run\.yaml: cannot be read: Permission denied\.$"):
        load_config(str(file))


def test_a_bare_name_means_the_packaged_config() -> None:
    assert find_config("vllm").name == "vllm.yaml"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
    ],
)
def test_only_loopback_needs_no_key(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    value: dict[str, Any] = {"host": host}
    if not loopback:
        value["api_keys"] = [{"key": SecretStr("k")}]
    assert HttpServerConfig(**value).host == host
    assert HttpServerConfig(host=host, dangerously_allow_unauthenticated=True).host == host


@pytest.mark.parametrize(
    ("server", "path"),
    [
        ('{api_keys: ["${env.KEY:=}"]}', "server.api_keys.0"),
        ('{api_keys: [sk-one, "${env.KEY:=}"]}', "server.api_keys.1"),
        ('{api_keys: [{key: "${env.KEY:=}", tenant: a}]}', "server.api_keys.0.key"),
        ('{api_keys: "${env.KEY:=}"}', "server.api_keys"),
    ],
)
def test_an_api_key_that_becomes_empty_is_refused(tmp_path: Path, server: str, path: str) -> None:
    """A server whose key is not set must not start without keys."""
    file = tmp_path / "run.yaml"
    file.write_text(f"server: {server}\ninference: {{provider: scripted}}\nkv_store: {{provider: memory}}\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(path)}: is empty"):
        load_config(str(file), env={})
    if "[" in server:
        assert load_config(str(file), env={"KEY": "sk-two"}).server.api_keys


def test_an_origin_is_a_scheme_and_a_host() -> None:
    for wrong in ("localhost:3000", "http://localhost/", "http://localhost/page"):
        with pytest.raises(ValidationError, match="no origin"):
            HttpServerConfig(cors_origins=[wrong])
    assert HttpServerConfig(cors_origins=["*", "http://localhost:3000"])
