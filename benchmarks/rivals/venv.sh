#!/usr/bin/env bash
# benchmarks/rivals/venv.sh DIR: an environment with all rivals of compare.py and this thinwire, on
# torch 2.13.0. A rival that cannot be installed is named at the end; the others stay, and
# compare.py says in its table what is missing.
set -eu
target=${1:?say where: benchmarks/rivals/venv.sh DIR}
root=$(cd "$(dirname "$0")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$target"
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt")
# PyPI's torch brings CUDA along. The CPU builds have an index of their own, for those who can reach it:
# TORCH_INDEX=https://download.pytorch.org/whl/cpu benchmarks/rivals/venv.sh DIR
"${pip[@]}" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch 'setuptools<81' wheel numpy
"${pip[@]}" -e "$root"
missing=()
"${pip[@]}" accelerate==1.15.0 || missing+=(accelerate)
"${pip[@]}" decent-dp==0.2.3 || missing+=(decent-dp)
"${pip[@]}" torchft-nightly==2026.10.26 || missing+=(torchft)
# hivemind builds its protocol with the setuptools that is there.
"${pip[@]}" --no-build-isolation hivemind==1.1.12 || missing+=(hivemind)
# DeepSpeed asks torch for its version while it is set up, and so needs the one just installed. This is
# the last release with OneBitAdam; nothing is compiled.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "${pip[@]}" --no-build-isolation deepspeed==0.19.6 || missing+=(deepspeed)
[ ${#missing[@]} = 0 ] || echo "could not be installed: ${missing[*]}" >&2
