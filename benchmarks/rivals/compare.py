"""`thinwire compare` with other libraries' methods among its own, in the same turns.

    benchmarks/rivals/venv.sh rivals        an environment with all of them; torch 2.13.0
    rivals/bin/python -m benchmarks.rivals.compare --methods ddp,overlapped,accelerate-local-sgd \\
        --hosts 4 --rate 100mbit --set every=8
    rivals/bin/python -m benchmarks.rivals.compare --quick        all rivals, 2 hosts, few steps

All flags are those of `thinwire compare`, and so are the table, the report and the directory; the
last line is one JSON object: {"methods": {"method rate": how much sooner than ddp, or why not}}. A
rival that is not installed, or cannot run here, has its place in the table with the reason. A
worker that it takes down is started again without it.

    accelerate-local-sgd   Hugging Face Accelerate's LocalSGD
    decent-dp              Decent-DP: every step with one neighbour, overlapped with the next
    deepspeed-one-bit      DeepSpeed 0.19.6's OneBitAdam
    torchft-local-sgd      torchft's LocalSGD, with its manager and lighthouse
    torchft-diloco         torchft's DiLoCo
    hivemind               hivemind.Optimizer over its DHT
"""

import os
import sys
import time
import traceback
from pathlib import Path

from benchmarks.harness.arguments import Size, end, parser
from benchmarks.rivals.accelerate import ACCELERATE
from benchmarks.rivals.decent import DECENT
from benchmarks.rivals.deepspeed import DEEPSPEED
from benchmarks.rivals.hivemind import HIVEMIND
from benchmarks.rivals.torchft import TORCHFT_DILOCO, TORCHFT_LOCAL_SGD
from thinwire.compare.launch import compare
from thinwire.compare.results import gather
from thinwire.compare.trial import Trial, TrialWorker
from thinwire.errors import ThinwireError
from thinwire.train.methods.registry import METHODS

RIVALS = (ACCELERATE, DECENT, DEEPSPEED, TORCHFT_LOCAL_SGD, TORCHFT_DILOCO, HIVEMIND)
ALL = ["--methods", ",".join(["ddp", *(rival.name for rival in RIVALS)]), "--hosts", "2"]
QUICK = [*ALL, "--delay", "1ms", "--model", "gpt-0.3m", "--batch", "2", "--steps", "24"]
QUICK += ["--context", "64", "--evals", "3", "--eval-windows", "16", "--set", "every=4"]
TINY = [*ALL, "--rate", "20mbit", "--delay", "1ms", "--model", "gpt-0.3m", "--batch", "1"]
TINY += ["--context", "16", "--steps", "4", "--evals", "1", "--eval-windows", "4"]
TINY += ["--set", "every=2", "--overtime", "1", "--timed", "0"]


def main() -> int:
    METHODS.update({rival.name: rival for rival in RIVALS})
    if "RANK" in os.environ:
        worker()
    given, flags = parser(__doc__).parse_known_args()
    flags = [*given.size.of(full=[], quick=QUICK, tiny=TINY), *flags]
    if "--run-dir" not in flags:
        flags += ["--run-dir", f"runs/rivals-{time.strftime('%Y%m%d-%H%M%S')}"]
    try:
        code = compare(flags, worker=[sys.executable, "-m", "benchmarks.rivals.compare"])
    except ThinwireError as error:
        sys.exit(f"{error}")
    cells = gather(Path(flags[flags.index("--run-dir") + 1])).cells
    end({"methods": {f"{c.method} {c.rate}": c.message or c.sooner for c in cells}}, given.size)
    return 0 if given.size is Size.TINY else code


def worker() -> None:
    """Ends at once when all is done: threads and processes of some rivals would outlive it."""
    code = 1
    try:
        runner = TrialWorker(Trial.read(Path(sys.argv[1])))
        code = runner.run()
        runner.control.barrier()
        code = 128 + code if code else 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
