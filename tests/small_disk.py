"""A small disk of a test's own: a tmpfs in a mount namespace, which needs no root.

`python tests/small_disk.py BYTES FOLDER` mounts it on FOLDER, reads scenarios as JSON from stdin -
one after another on the same disk - and prints what became of each. A scenario is a list of steps:

    ["fill", LEFT]           leaves so many bytes free     ["free"]    takes that away again
    ["thinwire", WORD, ...]  -> {"code", "out", "err"}     ["list"]    -> names and sizes of files
    ["load", RUN]            -> the step of its latest checkpoint, read whole
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_FILLER = "filler"


def run_scenarios(size: int, folder: Path, steps: list[list[Any]]) -> list[Any] | str:
    """What each step gave; a reason if this machine has no namespaces to mount in."""
    folder.mkdir(exist_ok=True)
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.small_disk", str(size), str(folder)],
        input=json.dumps(steps),
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode == 77:
        return done.stderr.strip()
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _mount(size: int, folder: Path) -> None:
    from thinwire.lab import kernel

    user, group = os.getuid(), os.getgid()
    try:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        kernel.write_proc("/proc/self/setgroups", "deny")
        kernel.write_proc("/proc/self/uid_map", f"{user} {user} 1")
        kernel.write_proc("/proc/self/gid_map", f"{group} {group} 1")
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"size={size}".encode()
        if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, options):
            raise OSError(ctypes.get_errno(), "mount")
    except Exception as error:
        print(f"no mount namespace here: {error}", file=sys.stderr)
        sys.exit(77)


def _fill(left: int) -> None:
    with open(_FILLER, "ab", buffering=0) as file:
        while (free := os.statvfs(".").f_bavail * os.statvfs(".").f_frsize) > left:
            file.write(bytes(min(free - left, 1 << 16)))


def _thinwire(words: list[str]) -> dict[str, Any]:
    """In a fork of this process, which has imported torch already."""
    streams = [Path(f"../{name}-{os.getpid()}") for name in ("out", "err")]
    child = os.fork()
    if child == 0:
        for number, path in enumerate(streams, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        from thinwire.cli import main

        code = main(words)
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    out, err = (path.read_text() for path in streams)
    return {"code": os.waitstatus_to_exitcode(status), "out": out, "err": err}


def _load(run: str) -> int:
    from thinwire.train.checkpoints import checkpoint

    manifest = checkpoint.read_manifest(run)
    for replica in range(manifest.replicas):
        checkpoint.load(run, replica=replica)
    return manifest.step


def _step(kind: str, *rest: Any) -> Any:
    if kind == "fill":
        return _fill(int(rest[0]))
    if kind == "free":
        return os.unlink(_FILLER)
    if kind == "thinwire":
        return _thinwire(list(map(str, rest)))
    if kind == "list":
        files = [path for path in Path().rglob("*") if path.is_file()]
        return {str(path): path.stat().st_size for path in files}
    return _load(str(rest[0]))


def main() -> None:
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    _mount(size, folder)
    os.chdir(folder)
    import thinwire.train.launch  # noqa: F401  (for all forks at once)

    steps = json.load(sys.stdin)
    print(json.dumps([_step(*step) for step in steps]))


if __name__ == "__main__":
    main()
