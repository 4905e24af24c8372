"""What the command does where its output cannot be written, where nobody reads it, and when it is interrupted."""

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "import validate.cli as c; c.main()"]
GOOD = [*COMMAND, "exponent", "-a", "2", "-b", "1", "--depths", "1,2"]
BAD = [*COMMAND, "exponent", "-a", "2"]
FULL = "/dev/full"  # opened for writing only
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="no device that is always full")


def shell(redirection, command=GOOD, unbuffered=""):
    """The command under ``sh`` with this redirection."""
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *command],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip


def test_no_arguments_show_the_help_in_lines_and_exit_2():
    done = shell("", COMMAND)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage:")
    assert "\n  exponent " in done.stderr


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [GOOD, [*GOOD, "--json"], [*COMMAND, "--help"]], ids=["text", "json", "help"])
def test_full_disk_behind_standard_output_is_one_sentence(command, unbuffered):
    done = shell(f"> {FULL}", command, unbuffered)
    assert done.returncode == 2
    assert done.stderr == "attnlaws: standard output must be writable: No space left on device\n"


def test_closed_standard_output_is_one_sentence():
    done = shell(">&-")
    assert done.returncode == 2
    assert done.stderr == "attnlaws: standard output must be open, but is closed\n"


@needs_full
def test_status_survives_a_standard_error_that_cannot_be_written():
    for redirection in ("2>&-", f"2> {FULL}", ">&- 2>&-"):
        done = shell(redirection, BAD)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert shell("2>&-").returncode == 0


@pytest.mark.parametrize("command", [GOOD, [*COMMAND, "floor", "--help"]], ids=["text", "help"])
def test_reader_that_goes_away_is_neither_success_nor_a_failed_comparison(command):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_broken_pipe_between_processes_is_not_taken_for_the_reader():
    code = (
        "import sys; sys.argv[1:] = ['exponent', '-a', '2', '-b', '1']; import validate.predictions as p\n"
        "def broken(*_): raise BrokenPipeError(32, 'Broken pipe')\n"
        "p.exponent_prediction = broken; import validate.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("module", ["click", "theory.results", "validate.commands.group", "rich.table"])
def test_interrupt_during_imports_is_quiet(module):
    code = (
        "import sys, validate.cli as c\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt()); c.main()"
    )
    command = [sys.executable, "-c", code, *GOOD[len(COMMAND) :]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.strip() == "interrupted"


def test_file_that_fails_later_is_named(capsys, monkeypatch):
    from validate import cli, predictions

    def fail(*_):
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr(predictions, "exponent_prediction", fail)
    monkeypatch.setattr(sys, "argv", ["attnlaws", "exponent", "-a", "2", "-b", "1"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "attnlaws: /some/file cannot be used: Permission denied\n"
