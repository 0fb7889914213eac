#!/usr/bin/env bash
# benchmarks/rivals/deepspeed_venv.sh DIR: an environment with DeepSpeed 0.19.6, the last release that
# has OneBitAdam, and this thinwire, on the CPU build of torch 2.13.0. Nothing is compiled.
set -eu
target=${1:?say where: benchmarks/rivals/deepspeed_venv.sh DIR}
root=$(cd "$(dirname "$0")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$target"
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt")
# The CPU wheels of torch have an index of their own; a machine may also have one at hand.
"${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu torch setuptools wheel numpy
# Its setup asks torch for the version, and so needs the one that was just installed.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "${pip[@]}" --no-build-isolation deepspeed==0.19.6
"${pip[@]}" -e "$root"
