"""Entry point of the ``attnlaws`` command; imports what it runs inside, so that Ctrl-C is quiet from the start."""

from __future__ import annotations

import os
import sys
from typing import IO

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
# What a shell reports for a program that SIGPIPE ended: neither success nor a failed comparison.
EXIT_READER_GONE = 141


def main() -> None:
    """Run the command and exit with the status that its help lists; return where that is 0."""
    if sys.stderr is None:  # closed by the caller; progress and complaints then go nowhere
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        status = run()
    except KeyboardInterrupt:
        say("interrupted")
        status = EXIT_INTERRUPTED
    if status:
        sys.exit(status)


def run() -> int:
    """The exit status of the command that ``sys.argv`` names. Raises SystemExit where the command itself exits."""
    import click

    from theory.results import AttnlawsError
    from validate.commands.group import ClosedPipeError, cli

    if sys.stdout is None:
        return complain("standard output must be open, but is closed")
    try:
        cli(standalone_mode=False)
    except click.ClickException as failure:
        return complain(failure.format_message())
    except AttnlawsError as failure:
        return complain(str(failure))
    except click.Abort:
        raise KeyboardInterrupt from None
    except ClosedPipeError:
        if not refuses(sys.stdout):  # the pipe is one between processes
            raise
        drop(sys.stdout)
        return EXIT_READER_GONE
    except OSError as failure:
        if refuses(sys.stdout):
            drop(sys.stdout)
            return complain(f"standard output must be writable: {failure.strerror}")
        if failure.filename is None:
            raise
        return complain(f"{failure.filename} cannot be used: {failure.strerror}")
    return 0


def complain(sentence: str) -> int:
    """Say in one line what is wrong; returns the status for bad input."""
    say("attnlaws: " + " ".join(sentence.split()))
    return EXIT_BAD_INPUT


def say(line: str) -> None:
    """A line on standard error, where that can be written; letters that it cannot show are replaced."""
    encoding = sys.stderr.encoding or "utf-8"
    try:
        print(line.encode(encoding, errors="replace").decode(encoding), file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def refuses(stream: IO[str]) -> bool:
    """Whether not even a line end can be written: an OSError does not say which file it comes from."""
    try:
        print(file=stream, flush=True)
    except OSError:
        return True
    return False


def drop(stream: IO[str]) -> None:
    """Send the rest of ``stream`` nowhere, so that Python does not fail on it once more when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
