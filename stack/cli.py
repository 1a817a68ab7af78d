"""The command line. It imports nothing heavy: a command imports its module when it runs."""

import gc
import sys
from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from apis.imports import import_from_string
from stack import __version__
from stack.deferred_packages import defer_package

# before any module imports them, for what a server needs of them or needs of them later; workers import this first, too
for package in (
    *("openai", "openai.types", "openai.types.chat", "openai.types.containers", "openai.types.conversations"),
    *("openai.types.responses", "openai.types.shared", "openai.types.shared_params", "openai.types.skills"),
    *("openai.types.uploads", "openai.types.vector_stores", "logging.config", "prometheus_client", "psutil", "uvicorn"),
):
    defer_package(package)

app = typer.Typer(
    help=(
        "Serve the Responses API over models that you run yourself.\n\n"
        "FILE is a run config: a path, or the name of a packaged one (local, gpt-oss, vllm, tools, local-tools, "
        "multi-provider).\n\n"
        "Exit codes: 0 done, or ended by a signal after running requests had finished; 1 something that the stack "
        "needs cannot be reached, or the check failed; 2 wrong usage; 78 the run config or the environment is wrong."
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class ClientName(StrEnum):
    """A client that `stack connect` knows."""

    CODEX = "codex"
    CLAUDE = "claude"
    OPENCODE = "opencode"
    CONTINUE = "continue"
    AIDER = "aider"
    GOOSE = "goose"
    ENV = "env"


FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="Run config: a path, or a packaged one's name.")]
HostOption = Annotated[str | None, typer.Option(help="Listen here instead of where the run config says.")]
PortOption = Annotated[int | None, typer.Option(min=0, max=65535, help="Listen on this port; 0 takes a free one.")]
WorkersOption = Annotated[int, typer.Option(min=1, max=64, help="Processes that share the port.")]
ReloadOption = Annotated[
    bool, typer.Option("--reload", help="Restart when the run config or a Python file here changes.")
]
NameArgument = Annotated[str | None, typer.Argument(metavar="[NAME]", help="A provider, an API, or server.")]
PackagedArgument = Annotated[str, typer.Argument(metavar="[NAME]", help="A packaged run config.")]
PathOption = Annotated[str, typer.Option(help="File to write.")]
TextArgument = Annotated[str, typer.Argument(metavar="TEXT")]
UrlOption = Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="Base URL of the API, with its /v1.")]
ModelOption = Annotated[str | None, typer.Option(help="The first one that the server lists, unless it is set.")]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model of the local engine: a name that `stack models` lists, hf:OWNER/REPOSITORY/FILE.gguf, or a path. "
        "Several are loaded as they are requested.",
    ),
]
ToolsOption = Annotated[
    bool, typer.Option("--tools", help="With the packaged config local: with the tools that this machine can run.")
]
LibraryNameArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A listed name, or hf:OWNER/NAME/FILE.gguf.")]
RequestsArgument = Annotated[str, typer.Argument(metavar="IN.jsonl", help="One request per line, as in /v1/batches.")]
OutputOption = Annotated[str | None, typer.Option(help="File of the results; IN.output.jsonl unless it is set.")]
ConfigOption = Annotated[str | None, typer.Option(metavar="FILE", help="Run config of a stack with the section files.")]
TargetOption = Annotated[str, typer.Option(metavar="FILE", help="Run config with the new section files.")]
WindowOption = Annotated[str, typer.Option(help="Time after which what is left expires: 30m, 24h, 7d.")]
AdminOption = Annotated[bool, typer.Option("--admin", help="A key that manages projects and keys, and nothing else.")]
ProjectOption = Annotated[str | None, typer.Option(help="Id of its project, which is created if it is absent.")]
KeyNameOption = Annotated[str, typer.Option(help="Name of the key.")]
ScopesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scope", help="A right: responses, files, read, model:NAME, tool:TYPE ...; repeatable. Without: all."
    ),
]
ExpiryOption = Annotated[int | None, typer.Option(min=1, max=3650, help="Days until it expires; never without.")]
DaysOption = Annotated[int, typer.Option(min=1, max=3650, help="Days (UTC), today included.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV.")]
KeyIdArgument = Annotated[str, typer.Argument(metavar="KEY_ID", help="An id that `stack keys list` prints.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ClientArgument = Annotated[ClientName, typer.Argument(metavar="CLIENT", help="The program to connect.")]
KeyVariableOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="NAME",
        help="Environment variable with the API key: OPENAI_API_KEY, unless it is set.",
    ),
]
DoctorUrlArgument = Annotated[str | None, typer.Argument(metavar="URL", help="Base URL of the API, with its /v1.")]
WriteOption = Annotated[bool, typer.Option("--write", help="Write files that are the stack's alone.")]
PrintOption = Annotated[bool, typer.Option("--print", help="Print what to put where: the default.")]
RestoreOption = Annotated[bool, typer.Option("--restore", help="Put back what --write changed.")]
VersionOption = Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)]


@app.callback(invoke_without_command=True)
def root(*, version: VersionOption = False) -> None:
    if version:
        typer.echo(f"stack {__version__}")
        raise typer.Exit


@app.command()
def run(
    *,
    file: FileArgument,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = 1,
    reload: ReloadOption = False,
    model: ModelsOption = None,
    tools: ToolsOption = False,
) -> None:
    """Serve FILE until SIGTERM or Ctrl-C.

    A second signal ends it at once.
    """
    if reload and workers > 1:
        raise typer.BadParameter("--reload runs one process; leave out --workers.")
    # A tenth of a start would be spent on collecting garbage among the imports; `serve` enables the collector again.
    gc.disable()
    try:
        server = {"host": host, "port": port}
        with import_from_string("stack.serving.exit_codes:exit_on_error")():
            left_out: dict[str, str] = {}
            if tools:
                file = import_from_string("stack.doctor.local_tools:name_tools_config")(file)
                left_out = import_from_string("stack.doctor.local_tools:find_missing_parts")()
            options = import_from_string("stack.serving.launch:LaunchOptions")
            launch = options(file, server, models=tuple(model or ()), left_out=left_out)
            code = import_from_string("stack.serving.launch:run")(launch, workers=workers, reload=reload)
    finally:
        gc.enable()
    raise typer.Exit(code)


@app.command()
def check(file: FileArgument, *, model: ModelsOption = None) -> None:
    """Say whether FILE would run; exit code 1 if not.

    Builds and starts its providers, lists the models, and lets the first ones generate a token.
    """
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        import_from_string("stack.check:check")(file, typer.echo, tuple(model or ()))


models_app = typer.Typer(help="List, fetch and remove models of the local engine.", rich_markup_mode=None)
app.add_typer(models_app, name="models")


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context, *, json: JsonOption = False) -> None:
    """List, fetch and remove models of the local engine: by name, with what fits this machine."""
    if context.invoked_subcommand is None:
        list_models(json=json)


@models_app.command(name="list")
def list_models(*, json: JsonOption = False) -> None:
    """List the models of the catalogue and the other GGUF files of the Hugging Face cache."""
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        typer.echo("\n".join(import_from_string("stack.models:list_models")(as_json=json)))


@models_app.command()
def pull(name: LibraryNameArgument, *, json: JsonOption = False) -> None:
    """Fetch a model and verify it; a download that broke off continues."""
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        typer.echo(import_from_string("stack.models:pull")(name, as_json=json))


@models_app.command()
def remove(name: LibraryNameArgument, *, json: JsonOption = False) -> None:
    """Remove a model's files from the cache."""
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        typer.echo(import_from_string("stack.models:remove")(name, as_json=json))


batch_app = typer.Typer(help="Run files of requests as batches.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(batch_app, name="batch")


@batch_app.callback()
def batches() -> None:
    """Run files of requests as batches."""


@batch_app.command(name="run")
def run_batch(
    *,
    requests: RequestsArgument,
    output: OutputOption = None,
    url: UrlOption = "http://127.0.0.1:8321/v1",
    config: ConfigOption = None,
    window: WindowOption = "24h",
) -> None:
    """Run the requests in a JSONL file and write their results.

    They run on the stack at URL, or with --config on one that is started for them. The key is read from
    OPENAI_API_KEY. Ctrl-C cancels the batch and writes the results so far.
    """
    run = import_from_string("stack.batch:run_batch")
    serve = import_from_string("stack.batch:serve_alone")

    def show(line: str) -> None:
        typer.echo(f"\r{line:<79}", nl=False, err=True)

    with import_from_string("stack.serving.exit_codes:exit_on_error")():
        with serve(config) if config else nullcontext(url) as base_url:
            summary = run(requests, output, base_url, window, show)
        typer.echo(summary)


files_app = typer.Typer(help="Move files between providers.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(files_app, name="files")


@files_app.callback()
def files() -> None:
    """Move files between providers."""


@files_app.command(name="move")
def move_files(file: FileArgument, *, to: TargetOption) -> None:
    """Move the bytes of all files of FILE to where another run config keeps files.

    Both name the same kv_store. A move that broke off goes on where it was. From `kv` to `object_store` it runs while
    servers with the new run config do; otherwise they must be stopped.
    """

    def show(line: str) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r{line:<79}\r", nl=False, err=True)

    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        typer.echo(import_from_string("stack.files:move")(file, to, show))


keys_app = typer.Typer(help="Create, list and revoke API keys in the store of a run config.", rich_markup_mode=None)
app.add_typer(keys_app, name="keys")


@keys_app.command(name="create")
def create_key(
    *,
    file: FileArgument,
    admin: AdminOption = False,
    project: ProjectOption = None,
    name: KeyNameOption = "key",
    scope: ScopesOption = None,
    expires_in_days: ExpiryOption = None,
) -> None:
    """Create a key and print it, this once."""
    if admin == (project is not None):
        raise typer.BadParameter("a key is either for a --project or for an administrator: --admin.")
    if admin and scope:
        raise typer.BadParameter("--admin has no further scopes.")
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        expires_in_s = None if expires_in_days is None else expires_in_days * 86_400
        request = import_from_string("stack.keys:KeyRequest")(project, name, tuple(scope or ()), expires_in_s)
        typer.echo("\n".join(import_from_string("stack.keys:create")(file, request)))


@keys_app.command(name="list")
def list_keys(file: FileArgument, *, json: JsonOption = False) -> None:
    """List the keys of all projects and of the administrators, without their text."""
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        typer.echo("\n".join(import_from_string("stack.keys:list_keys")(file, as_json=json)))


@keys_app.command(name="revoke")
def revoke_key(file: FileArgument, key_id: KeyIdArgument) -> None:
    """Revoke a key: every server of the store refuses it within a second."""
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        typer.echo(import_from_string("stack.keys:revoke")(file, key_id))


@app.command()
def usage(file: FileArgument, *, days: DaysOption = 30, csv: CsvOption = False) -> None:
    """Show the tokens, requests and tool calls of the last days by project, key and model."""
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        typer.echo("\n".join(import_from_string("stack.usage:usage_lines")(file, days=days, as_csv=csv)))


@app.command(name="list")
def list_providers(name: NameArgument = None) -> None:
    """List the providers and the fields of a run config.

    With NAME (a provider, an API, or server) only that, with all of its documentation.
    """
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=2):
        typer.echo("\n".join(import_from_string("stack.provider_list:provider_lines")(name)))


@app.command()
def init(name: PackagedArgument = "local", *, path: PathOption = "run.yaml") -> None:
    """Copy a packaged run config into this folder.

    An existing file is not touched.
    """
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        import_from_string("stack.config:copy_packaged_config")(name, path)
    typer.echo(f"Wrote {path}. Serve it: stack run {path}")


@app.command()
def ask(*, text: TextArgument, url: UrlOption = "http://127.0.0.1:8321/v1", model: ModelOption = None) -> None:
    """Send TEXT to a running stack and print the answer.

    The key is read from OPENAI_API_KEY.
    """
    with import_from_string("stack.serving.exit_codes:exit_on_error")():
        import_from_string("stack.ask:ask")(text, url, model, partial(typer.echo, nl=False))
    typer.echo()


@app.command()
def connect(
    *,
    client: ClientArgument,
    url: UrlOption = "http://127.0.0.1:8321/v1",
    key: KeyVariableOption = None,
    model: ModelOption = None,
    write: WriteOption = False,
    restore: RestoreOption = False,
    print_: PrintOption = False,
) -> None:
    """Show or write the settings by which CLIENT uses a running stack.

    `env` is for all clients of OpenAI's and Anthropic's SDKs. Your own settings of the client are never changed.
    """
    if write + restore + print_ > 1:
        raise typer.BadParameter("choose one of --write, --print and --restore.")
    action = "write" if write else "restore" if restore else "print"
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        for line in import_from_string("stack.connect.command:connect")(client.value, url, key, model, action):
            typer.echo(line)


@app.command()
def doctor(
    url: DoctorUrlArgument = None, *, key: KeyVariableOption = None, model: ModelOption = None, json: JsonOption = False
) -> None:
    """Check a running stack, or this machine without URL; exit code 1 if something does not work.

    Each line that is not ok ends with its remedy. A warning is for what a stack can do without. Without URL, --model
    is one of the local engine, whose memory is checked.
    """
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        code = import_from_string("stack.doctor.command:doctor")(url, key, model, typer.echo, as_json=json)
    raise typer.Exit(code)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    options_metavar="[URL] [OPTIONS]",
)
def bench(context: typer.Context) -> None:
    """Send load to a running stack and print requests/s, tokens/s, latencies, errors, CPU and memory.

    `stack bench --help` lists its options.
    """

    def show(line: str) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r{line:<79}\r", nl=False, err=True)

    with import_from_string("stack.serving.exit_codes:exit_on_error")():
        code = import_from_string("stack.bench.command:bench")(context.args, typer.echo, show)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the `stack` command."""
    # A run config may name a class of the user's own, in a file of the working directory. Last, so that no file or
    # folder there replaces an installed package.
    sys.path.append("")
    app(prog_name="stack")
