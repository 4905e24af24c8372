"""The command ``attnlaws``: its subcommands under one name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from validate.cli import EXIT_BAD_INPUT
from validate.commands import comparison, depth, fit, multihead, report, training


class ClosedPipeError(Exception):
    """Somebody has stopped reading what the command, or a process of it, writes; the cause is the BrokenPipeError."""


class PipeNamingGroup(click.Group):
    """A group that lets `ClosedPipeError` through, where click would exit with the status of a failed comparison."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments; --help and --version already write."""
        with naming_closed_pipes():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        with naming_closed_pipes():
            return super().invoke(ctx)


@contextmanager
def naming_closed_pipes() -> Iterator[None]:
    """Raise ClosedPipeError for a BrokenPipeError."""
    try:
        yield
    except BrokenPipeError as failure:
        raise ClosedPipeError from failure


@click.group(
    cls=PipeNamingGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.version_option(package_name="attnlaws")
@click.pass_context
def cli(context: click.Context) -> None:
    """Exact laws of attention and in-context regression, checked and compared with simulation.

    Exit status: 0 done, 1 something expected to hold failed, 2 bad input or output that cannot be written (one
    sentence on standard error), 130 interrupted, 141 the reader of the output has gone, as in `attnlaws ... | head`.

    Start with:  attnlaws exponent -a 2 -b 1 --dim 128
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        sys.exit(EXIT_BAD_INPUT)


for command in (
    depth.exponent,
    depth.floor,
    multihead.softmax_risk,
    multihead.icl_risk,
    multihead.optimum,
    fit.fit,
    comparison.verify,
    comparison.reproduce,
    report.report,
    training.train,
):
    cli.add_command(command)
