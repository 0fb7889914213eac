"""The command line: thinwire train | compare | report | top | lab | export | methods.

Each command imports what it needs when it is called: `thinwire --help` and `thinwire lab` start
without torch. Bad input, and a machine that cannot do what was asked of it, is one line on stderr
and exit code 2; a disk that is full, or a run's directory that is gone, one line and exit code 3.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import thinwire
from thinwire.command_line import parse_words, shown
from thinwire.errors import LabError, StorageError, ThinwireError, UsageError
from thinwire.text import printable

STORAGE = 3  # the exit code of a StorageError
_LONGEST = 800  # characters of a message

_HELP = """usage: thinwire COMMAND [flags]

  train    train a model: alone, under torchrun, or on workers it starts itself (--workers, --lab)
  compare  train the same under several methods on emulated links, and show what each costs
  report   show a comparison again, and write its report
  top      watch a run while it goes on, or look at one that has ended
  lab      run a command on every host of an emulated network
  export   write the weights of a run as one safetensors file
  methods  list the methods --method takes

thinwire COMMAND --help lists a command's flags.  thinwire --version"""


def _train(argv: list[str]) -> int:
    # A lost peer would make torch's C++ print thirty lines of its stack beside our one.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from thinwire.train.launch import train

    return train(argv)


def _compare(argv: list[str]) -> int:
    from thinwire.compare.launch import compare

    return compare(argv)


def _report(argv: list[str]) -> int:
    import tyro
    from rich.console import Console

    from thinwire.compare.launch import report

    @dataclass
    class ReportConfig:
        """Show a comparison's figures again, and write its report."""

        run: tyro.conf.Positional[str]
        """The comparison's directory."""
        json: bool = False
        """Print the table as JSON on stdout, and everything else on stderr."""

    config = parse_words(ReportConfig, argv, prog="thinwire report")
    report(Path(config.run), Console(stderr=config.json), as_json=config.json)
    return 0


def _top(argv: list[str]) -> int:
    from thinwire.report.top import TopConfig, top

    return top(parse_words(TopConfig, argv, prog="thinwire top"))


def _lab(argv: list[str]) -> int:
    from thinwire.lab.command import LabConfig, run_lab

    flags, dashes, command = _split(argv)
    if not dashes and not {"-h", "--help"} & set(flags):
        raise UsageError("no command to run: write it after --, as in: thinwire lab -- python x.py")
    description = "Run a command on every emulated host: thinwire lab [flags] -- COMMAND ..."
    config = parse_words(LabConfig, flags, prog="thinwire lab", description=description)
    return run_lab(config, command)


def _export(argv: list[str]) -> int:
    import tyro

    from thinwire.train.checkpoints.export import export

    @dataclass
    class ExportConfig:
        """Write the weights of a run as one safetensors file."""

        source: tyro.conf.Positional[str]
        """A run's directory, or one checkpoint of it."""
        out: str
        """The file to write."""
        force: bool = False
        """Overwrite it if it exists."""

    config = parse_words(ExportConfig, argv, prog="thinwire export")
    print(f"wrote {export(config.source, config.out, force=config.force)}")
    return 0


def _methods(argv: list[str]) -> int:
    if argv and set(argv) <= {"-h", "--help"}:
        print("usage: thinwire methods\n\nList the methods that thinwire train --method takes.")
        return 0
    if argv:
        raise UsageError(f"thinwire methods takes no arguments, got {shown(' '.join(argv))}")
    from thinwire.train.methods.registry import METHODS

    for name, method in METHODS.items():
        print(f"{name:16} {method.summary}")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "compare": _compare,
    "report": _report,
    "top": _top,
    "lab": _lab,
    "export": _export,
    "methods": _methods,
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except ThinwireError as error:
        return _ended(_say(str(error), _code(error)))
    except BrokenPipeError:  # the reader of our output has gone, as in `thinwire ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ended(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return _ended(128 + signal.SIGINT)
    except Exception as error:
        if said := _of_the_machine(error):
            return _ended(_say(*said))
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        return _ended(1)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"thinwire {thinwire.__version__}")
        return 0
    if words[0] not in _COMMANDS:
        raise UsageError(f"there is no command {shown(words[0])}: takes {', '.join(_COMMANDS)}")
    return _COMMANDS[words[0]](words[1:])


def _say(text: str, code: int) -> int:
    """One line, whatever is in it; a long one without its middle."""
    line = printable(" ".join(text.split()))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 4 :]}"
    print(f"thinwire: {line}", file=sys.stderr, flush=True)
    return code


def _of_the_machine(error: Exception) -> tuple[str, int] | None:
    """What the operating system refuses, and its exit code: a file, or memory. None for the rest,
    which is a mistake of ours and is shown with its place."""
    if isinstance(error, OSError) and error.filename is not None:
        disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
        return f"{error.filename!s:.200}: {error.strerror}", STORAGE if disk else 2
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory ({error!s:.200}): lower --batch, --model or --workers", 1
    return None


def _code(error: ThinwireError) -> int:
    if isinstance(error, UsageError | LabError):
        return 2
    return STORAGE if isinstance(error, StorageError) else 1


def _ended(code: int) -> int:
    """A worker ends here and now: its process group's destructor would wait for its peers."""
    if "RANK" in os.environ:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in argv:
        return argv, False, []
    at = argv.index("--")
    return argv[:at], True, argv[at + 1 :]
