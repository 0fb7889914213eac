"""`thinwire compare` with other libraries' methods among its own, in the same turns.

    benchmarks/peers/venv.sh peers          an environment with all of them; torch 2.13.0
    peers/bin/python benchmarks/peers/compare.py --methods ddp,overlapped,accelerate-local-sgd \\
        --hosts 4 --rate 100mbit --set every=8
    ... compare.py --quick                  all peers, 2 hosts, few steps

All flags are those of `thinwire compare`, and so are the table, the report and the directory; the
last line is one JSON object. A peer that is not installed, or cannot run here, has its place in the
table with the reason. A worker that it takes down is started again without it.

    accelerate-local-sgd   Hugging Face Accelerate's LocalSGD
    decent-dp              Decent-DP: every step with one neighbour, overlapped with the next
    deepspeed-one-bit      DeepSpeed 0.19.6's OneBitAdam
    torchft-local-sgd      torchft's LocalSGD, with its manager and lighthouse
    torchft-diloco         torchft's DiLoCo
    hivemind               hivemind.Optimizer over its DHT
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from accelerate_peer import ACCELERATE  # noqa: E402
from decent_peer import DECENT  # noqa: E402
from deepspeed_peer import DEEPSPEED  # noqa: E402
from hivemind_peer import HIVEMIND  # noqa: E402
from torchft_peer import TORCHFT_DILOCO, TORCHFT_LOCAL_SGD  # noqa: E402

from thinwire.compare import heat, launch  # noqa: E402
from thinwire.compare.results import gather  # noqa: E402
from thinwire.errors import ThinwireError  # noqa: E402
from thinwire.train.methods import METHODS  # noqa: E402

PEERS = (ACCELERATE, DECENT, DEEPSPEED, TORCHFT_LOCAL_SGD, TORCHFT_DILOCO, HIVEMIND)
QUICK = ["--hosts", "2", "--delay", "1ms", "--model", "gpt-0.3m", "--batch", "2", "--steps", "24"]
QUICK += ["--context", "64", "--evals", "3", "--eval-windows", "16", "--set", "every=4"]


def main(argv: list[str]) -> int:
    METHODS.update({peer.name: peer for peer in PEERS})
    if "RANK" in os.environ:
        worker()
    if "--quick" in argv:
        argv = [word for word in argv if word != "--quick"]
        argv = ["--methods", ",".join(["ddp", *(peer.name for peer in PEERS)]), *QUICK, *argv]
    if "--run" not in argv:
        argv += ["--run", f"runs/peers-{time.strftime('%Y%m%d-%H%M%S')}"]
    try:
        code = launch.compare(argv, worker=[sys.executable, str(Path(__file__).resolve())])
    except ThinwireError as error:
        sys.exit(f"{error}")
    comparison = gather(Path(argv[argv.index("--run") + 1]))
    print(json.dumps({f"{c.method} {c.rate}": c.message or c.sooner for c in comparison.cells}))
    return code


def worker() -> None:
    """Ends at once when all is done: threads and processes of some peers would outlive it."""
    code = 1
    try:
        runner = heat.HeatWorker(heat.Heat.read(Path(sys.argv[1])))
        code = runner.run()
        runner.control.barrier()
        code = 128 + code if code else 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
