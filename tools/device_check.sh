#!/usr/bin/env bash
# Correctness, then speed, of the step on one CUDA GPU, CUDA graphs included; under 6 minutes. Needs an environment with
# a CUDA build of torch. The speed is against eager stock alone: compiling the other Muons would take longer than that.
#
#   PYTHON=.venv/bin/python tools/device_check.sh [out/device]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-out/device}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
timeout 200 "$python" tools/device_check.py --json "$out/check.json"
timeout 150 "$python" tools/bench_step.py --device cuda --seconds 3 --peers --json "$out/bench.json" \
  --png "$out/bench.png" --sets tiny thin wide square big llama-1b
