#!/usr/bin/env bash
# What only an Ascend NPU can show, in a few minutes: that GE takes the step's graph, what HCCL makes of its collectives,
# kernels' accuracy, launches and speed. Send back the folder that it writes. Needs torch, torch_npu, CANN (set_env.sh
# sourced), protobuf and packaging.
#
#   PYTHON=python3 tools/npu_check.sh [out/npu] [number of NPUs, default 1]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-out/npu}
ranks=${2:-1}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
{ npu-smi info || true; cat "${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}"/version.cfg || true; } \
  >"$out/machine.txt" 2>&1
timeout 600 "$python" tools/npu_check.py --out "$out/one" 2>&1 | tee "$out/one.txt"
if ((ranks > 1)); then
  timeout 600 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" tools/npu_check.py \
    --out "$out/ranks" 2>&1 | tee "$out/ranks.txt"
fi
echo "done: please send back $out"
