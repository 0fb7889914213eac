"""The command line: thinwire train | compare | report | top | lab | export | methods.

Each command imports what it needs when it is called: `thinwire --help` and `thinwire lab` start
without torch. Bad input, and a machine that cannot do what was asked of it, is one line on stderr
and exit code 2.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import thinwire
from thinwire.errors import LabError, ThinwireError, UsageError
from thinwire.text import printable

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

    def command(run: tyro.conf.Positional[str], json: bool = False) -> int:
        """Show a comparison's figures again, and write its report.

        Args:
            run: The comparison's directory.
            json: Print the table as JSON on stdout, and everything else on stderr.
        """
        report(Path(run), Console(stderr=json), as_json=json)
        return 0

    return tyro.cli(command, args=argv, prog="thinwire report")


def _top(argv: list[str]) -> int:
    import tyro

    from thinwire.report.top import TopConfig, top

    config = tyro.cli(TopConfig, args=argv, prog="thinwire top")
    return top(config)


def _lab(argv: list[str]) -> int:
    import tyro

    from thinwire.lab.command import LabConfig, run_lab

    flags, dashes, command = _split(argv)
    if not dashes and not {"-h", "--help"} & set(flags):
        raise UsageError("no command to run: write it after --, as in: thinwire lab -- python x.py")
    description = "Run a command on every emulated host: thinwire lab [flags] -- COMMAND ..."
    config = tyro.cli(
        tyro.conf.OmitArgPrefixes[LabConfig],
        args=flags,
        prog="thinwire lab",
        description=description,
    )
    return run_lab(config, command)


def _export(argv: list[str]) -> int:
    import tyro

    from thinwire.train.export import export

    def command(source: tyro.conf.Positional[str], out: str, force: bool = False) -> str:
        """Write the weights of a run as one safetensors file.

        Args:
            source: A run's directory, or one checkpoint of it.
            out: The file to write.
            force: Overwrite it if it exists.
        """
        return str(export(source, out, force=force))

    print(f"wrote {tyro.cli(command, args=argv, prog='thinwire export')}")
    return 0


def _methods(argv: list[str]) -> int:
    if argv and set(argv) <= {"-h", "--help"}:
        print("usage: thinwire methods\n\nList the methods that thinwire train --method takes.")
        return 0
    if argv:
        raise UsageError(f"thinwire methods takes no arguments, got {' '.join(argv)}")
    from thinwire.train.methods import METHODS

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
        print(f"thinwire: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        return _ended(2 if isinstance(error, UsageError | LabError) else 1)
    except BrokenPipeError:  # the reader of our output has gone, as in `thinwire ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ended(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return _ended(128 + signal.SIGINT)
    except Exception:
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
        raise UsageError(f"there is no command {words[0]!r}: takes {', '.join(_COMMANDS)}")
    return _COMMANDS[words[0]](words[1:])


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
