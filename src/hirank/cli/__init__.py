"""The command line: parse, build a configuration, call one function, print.

Exit codes: 0 done, 2 bad input (one sentence), 130 interrupted, 1 anything else; `doctor`,
`audit` and `plan` say in their help what 1 means there. One module for each command, or a few
that belong together.
"""

import typer

from hirank.bench.cli import mount as mount_bench
from hirank.cli import audit, doctor, export, merge, plan, run, train

__all__ = ["app", "main", "version"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train large models at high quality in little memory.",
)

train.mount(app)
plan.mount(app)
doctor.mount(app)
mount_bench(app)
run.mount(app)
audit.mount(app)
merge.mount(app)
export.mount(app)


def main() -> None:
    """Run the command line and leave with its exit code."""
    app()


@app.command()
def version() -> None:
    """Print the version."""
    import hirank

    print(hirank.__version__)
