"""The ``attnlaws`` command."""

from __future__ import annotations

import sys

import click

from validate.commands import comparison, depth, fit, multihead, report, training

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="attnlaws")
def cli() -> None:
    """Exact laws of attention and in-context regression, checked and compared with simulation.

    Start with:  attnlaws exponent -a 2 -b 1 --dim 128
    """


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


def main() -> None:
    """Entry point: exit 0 done, 1 something expected to hold failed, 2 bad input in one sentence, 130 interrupted."""
    from theory.results import AttnlawsError

    try:
        cli(standalone_mode=False)
    except click.ClickException as failure:
        fail(failure.format_message())
    except AttnlawsError as failure:
        fail(str(failure))
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)


def fail(sentence: str) -> None:
    """Print one sentence on standard error and exit with the status for bad input."""
    text = " ".join(sentence.split())
    encoding = sys.stderr.encoding or "utf-8"
    click.echo(f"attnlaws: {text}".encode(encoding, errors="replace").decode(encoding), err=True)
    sys.exit(EXIT_BAD_INPUT)
