"""The command line: bad input is one line, exit code 2 and nothing written."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import Program, Start, corpus, listing, small, thinwire  # noqa: F401
from thinwire.lab import kernel
from thinwire.lab.environment import free_port


def assert_refused(program: Program, said: str) -> None:
    assert program.wait() == 2, program.err
    assert re.fullmatch(r"thinwire: .*\n", program.err), program.err
    assert said in program.err
    assert program.out == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--method", "best"], "--method takes one of none, ddp"),
        (["--model", "gpt-9t"], "--model takes gpt-0.3m"),
        (["--lab", "--rate", "fast", "--workers", "2"], "'fast'"),
        (["--lab", "--workers", "2", "--host", "7:rate=1mbit"], "host 7 does not exist"),
        (["--workers", "0"], "--workers takes a number >= 1"),
        (["--workers", "999"], "takes 1 to 128"),
        (["--data", "files:empty/*.txt"], "is empty"),
        (["--data", "files:none/*.txt"], "no file matches"),
        (["--data", "web"], "--data takes stdlib"),
        (["--context", "100000"], "use a smaller --context or more data"),
        (["--method", "average", "--codec", "int3"], "int3"),
        (["--optimizer", "Adamm"], "--optimizer takes one of"),
        (["--optimizer-arg", "beta=1"], "--optimizer-arg beta: AdamW takes"),
        (["--tensorboard"], "pip install 'thinwire[tensorboard]'"),
        (["--tokenizer", "x.json"], "pip install thinwire[tokenizers]"),
        (["--data", "digits", "--context", "128"], "pip install 'thinwire[images]'"),
        (["--run", "a-file"], "is a file, not a directory"),
        (["--run", "a-file/below"], "is a file, not a directory"),
        (["--run", "nowhere", "--resume"], "no such file or directory"),
        (["--run", "empty", "--resume"], "no thinwire checkpoint"),
        (["--config", "nowhere.toml"], "No such file"),
    ],
)
def test_bad_input(
    thinwire: Start,
    small: list[str],
    flags: list[str],
    said: str,
) -> None:
    desk = Path.cwd()
    (desk / "empty").mkdir()
    (desk / "empty" / "a.txt").touch()
    (desk / "a-file").touch()
    before = listing(desk)
    hide = hide_extras if "pip" in said else None
    assert_refused(thinwire("train", *small, "--steps", 1, *flags, before=hide), said)
    assert listing(desk) == before


def hide_extras() -> None:
    for name in ("sklearn", "tensorboard", "tokenizers"):
        sys.modules[name] = None  # type: ignore[assignment]


def test_checkpoints_that_cannot_be_used(
    thinwire: Start,
    small: list[str],
) -> None:
    """Alone, and by the launcher before it starts anybody."""
    desk = Path.cwd()
    assert thinwire("train", *small, "--steps", 2, "--run", "good").wait() == 0
    for name in ("short", "flipped", "manifest"):
        shutil.copytree("good", name)
    data = [next(Path(n).rglob("replica-0/*.distcp")) for n in ("short", "flipped")]
    data[0].write_bytes(data[0].read_bytes()[:-100])
    content = bytearray(data[1].read_bytes())
    content[len(content) // 2] ^= 1
    data[1].write_bytes(content)
    next(Path("manifest").rglob("thinwire.json")).write_text("{")
    (desk / "foreign").mkdir()
    (desk / "foreign" / ".metadata").touch()
    before = listing(desk)
    for run, flags, said in (
        ("short", [], "is corrupt"),
        ("flipped", [], "is corrupt"),
        ("manifest", [], "is corrupt"),
        ("foreign", [], "thinwire did not make"),
        ("good", ["--model", "gpt-1m"], "of another model"),
        ("good", ["--context", "8"], "of another model"),
        ("good", ["--method", "none"], "was made with --method ddp"),
    ):
        for workers in (1, 2) if "corrupt" in said else (2,):
            argv = ["--run", run, "--resume", "--steps", 9, "--workers", workers, *flags]
            assert_refused(thinwire("train", *argv), said)
            assert listing(desk) == before, run
    assert_refused(thinwire("train", *small, "--run", "good"), "already holds a run")
    assert_refused(thinwire("export", "foreign", "--out", "x"), "thinwire did not make")
    assert_refused(thinwire("export", "good", "--out", "no/where/x"), "there is no directory")
    assert listing(desk) == before


def test_a_run_directory_in_use(
    thinwire: Start,
    small: list[str],
) -> None:
    run = Path.cwd() / "run"
    first = thinwire("train", *small, "--steps", 100000, "--run", run)
    first.until((run / ".lock").exists)
    for workers in (1, 2):
        second = thinwire("train", *small, "--run", run, "--workers", workers)
        assert_refused(second, "in use by another run")
    assert first.running
    assert not (run / "summary.json").exists()


def no_namespaces() -> None:
    """In a user namespace where the kernel allows no PID namespace to be made."""
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.write_proc("/proc/self/setgroups", "deny")
    kernel.write_proc("/proc/self/uid_map", f"{user} {user} 1")
    kernel.write_proc("/proc/self/gid_map", f"{group} {group} 1")
    kernel.write_proc("/proc/sys/user/max_pid_namespaces", "0")


def no_ports() -> None:
    """In a network namespace of which the only port to be had is taken."""
    user = os.getuid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNET)
    kernel.write_proc("/proc/self/uid_map", f"0 {user} 1")
    kernel.bring_up("lo")
    kernel.write_proc("/proc/sys/net/ipv4/ip_local_port_range", "40000 40000")
    taken = socket.socket()
    taken.bind(("127.0.0.1", 40000))
    _kept.append(taken)


_kept: list[socket.socket] = []


def allowed(prepare: str) -> bool:
    code = f"import tests.test_cli as t; t.{prepare}()"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize(
    ("prepare", "flags", "said"),
    [
        (no_namespaces, ["--lab"], "the lab cannot build its network here"),
        (no_ports, [], "no free port on 127.0.0.1"),
    ],
)
def test_a_machine_that_cannot(
    thinwire: Start,
    small: list[str],
    prepare: object,
    flags: list[str],
    said: str,
) -> None:
    if not allowed(getattr(prepare, "__name__", "")):
        pytest.skip("no user namespaces here to make such a machine in")
    desk = Path.cwd()
    argv = ["train", *small, "--workers", 2, "--run", "runs/run", *flags]
    assert_refused(thinwire(*argv, before=prepare), said)
    assert listing(desk) == {}


def worker(rank: int, port: int, size: int = 2) -> dict[str, str]:
    """What torchrun gives a worker."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_a_port_that_is_taken(
    thinwire: Start,
    small: list[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        program = thinwire("train", *small, env=worker(0, port))
        assert_refused(program, f"no free port: 127.0.0.1:{port} is in use")
    assert listing(Path.cwd()) == {}


@pytest.mark.parametrize(
    ("flags", "others", "said"),
    [
        ([], ["--lr", "0.5"], "setting 'lr' differs between ranks: 0.001 on rank 0; 0.5 on rank 1"),
        ([], ["--method", "none"], "setting 'bucket_mb' differs between ranks"),
        ([], ["--run", "other"], "setting 'run_dir' differs between ranks"),
        (["--data", "files:here/*.txt"], [], "no file matches"),
        (["--run", "a-file"], [], "is a file, not a directory"),
        (["--workers", "3"], [], "--workers 3 starts workers, but torchrun has started 2"),
        (["--lab"], [], "--lab starts workers"),
    ],
)
def test_workers_that_others_started_refuse_together(
    thinwire: Start,
    small: list[str],
    flags: list[str],
    others: list[str],
    said: str,
) -> None:
    desk = Path.cwd()
    (desk / "a-file").touch()
    before = listing(desk)
    port = free_port()
    extra = {0: flags, 1: [*flags, *others]}
    both = [thinwire("train", *small, *extra[rank], env=worker(rank, port)) for rank in (0, 1)]
    for program in both:
        assert_refused(program, said)
    assert listing(desk) == before


def only_rank_1_fails() -> None:
    if os.environ["RANK"] == "1":
        os.chdir("elsewhere")


def test_what_one_worker_refuses_all_refuse(
    thinwire: Start,
    small: list[str],
) -> None:
    desk = Path.cwd()
    (desk / "elsewhere").mkdir()
    (desk / "a.txt").write_text("some words " * 500)
    before = listing(desk)
    port = free_port()
    argv = ["train", *small, "--data", "files:*.txt", "--run", desk / "run"]
    zero, one = (
        thinwire(*argv, env=worker(rank, port), before=only_rank_1_fails) for rank in (0, 1)
    )
    assert_refused(one, "no file matches")
    assert_refused(zero, "worker 1: --data: no file matches")
    assert listing(desk) == before


def test_words_that_mean_nothing(thinwire: Start) -> None:
    assert_refused(thinwire("trian"), "there is no command 'trian': takes train, compare, report")
    assert_refused(thinwire("lab", "--rate", "1mbit"), "no command to run")
    assert_refused(thinwire("methods", "ddp"), "takes no arguments")
    program = thinwire("train", "--stpes", 3)
    assert program.wait() == 2
    assert "--steps" in program.err
    assert thinwire().wait() == 2


def test_the_lists(thinwire: Start) -> None:
    program = thinwire("methods")
    assert program.wait() == 0
    names = [line.split()[0] for line in program.out.splitlines()]
    assert names[:3] == ["none", "ddp", "average"]
    version = thinwire("--version")
    assert version.wait() == 0
    assert re.fullmatch(r"thinwire \d+\.\d+\.\d+\n", version.out)


@pytest.mark.parametrize("argv", [["--help"], ["lab", "--help"], ["--version"], ["trian"]])
def test_torch_is_not_imported_for_this(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "thinwire", *argv],
        capture_output=True,
        text=True,
    )
    imported = re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "thinwire.cli" in imported
    assert not [name for name in imported if name.split(".")[0] in ("torch", "numpy")]


def test_a_reader_that_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""
