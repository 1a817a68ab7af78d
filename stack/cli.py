"""The command line. It imports nothing heavy: a command imports its module when it runs."""

import gc
import sys
from typing import Annotated

import typer

from apis.imports import import_from_string
from stack import __version__

# Of the openai package only the types are used; this part of its client would import aiohttp, a tenth of a cold start.
# None stands for a module that is absent, which the package expects. Workers import this module first, too.
sys.modules.setdefault("openai._vendor.httpx_aiohttp", None)  # type: ignore[arg-type]  # as the import system has it

app = typer.Typer(
    help=(
        "Serve the Responses API over models that you run yourself.\n\n"
        "FILE is a run config: a path, or the name of a packaged one (local, gpt-oss, vllm, tools, multi-provider).\n\n"
        "Exit codes: 0 done, or ended by a signal after running requests had finished; 1 something that the stack "
        "needs cannot be reached, or the check failed; 2 wrong usage; 78 the run config or the environment is wrong."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="Run config: a path, or a packaged one's name.")]
HostOption = Annotated[str | None, typer.Option(help="Listen here instead of where the run config says.")]
PortOption = Annotated[int | None, typer.Option(min=0, max=65535, help="Listen on this port; 0 takes a free one.")]
WorkersOption = Annotated[int, typer.Option(min=1, max=64, help="Processes that share the port.")]
ReloadOption = Annotated[
    bool, typer.Option("--reload", help="Restart when the run config or a Python file here changes.")
]
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
) -> None:
    """Serve what FILE wires together, until SIGTERM or Ctrl-C. A second one ends it at once."""
    if reload and workers > 1:
        raise typer.BadParameter("--reload runs one process; leave out --workers.")
    # A tenth of a start would be spent on collecting garbage among the imports; `serve` enables the collector again.
    gc.disable()
    try:
        launch = import_from_string("stack.serving.launch:LaunchOptions")(file, {"host": host, "port": port})
        with import_from_string("stack.serving.exit_codes:exit_on_error")():
            code = import_from_string("stack.serving.launch:run")(launch, workers=workers, reload=reload)
    finally:
        gc.enable()
    raise typer.Exit(code)


@app.command()
def check(file: FileArgument) -> None:
    """Say whether FILE would run: build and start its providers, and ask for the models. Exit code 1 if not."""
    with import_from_string("stack.serving.exit_codes:exit_on_error")(config_error_code=1):
        import_from_string("stack.check:check")(file, typer.echo)


@app.command(name="list")
def list_providers() -> None:
    """List the APIs, their providers, and the fields of each in a run config."""
    typer.echo("\n".join(import_from_string("stack.check:provider_lines")()))


def main() -> None:
    """Entry point of the `stack` command."""
    # a run config may name a class of the user's own, in a file of the working directory
    sys.path.insert(0, "")
    app(prog_name="stack")
