"""`python -m benchmarks.harness.worker MODULE FUNCTION ARGUMENTS`: what hosts.py starts."""

import json
import sys
from importlib import import_module

from benchmarks.harness.telling import answer


def main() -> None:
    module, function, arguments = sys.argv[1:]
    answer(getattr(import_module(module), function)(*json.loads(arguments)))


if __name__ == "__main__":
    main()
