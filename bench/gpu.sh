#!/usr/bin/env bash
# The whole GPU run in one command, under 8 minutes: tests, the oracle check, the benchmarks. Rows go to bench/results/ (or to the
# directory given as the first argument). Needs a python with a CUDA or ROCm build of torch >= 2.10 and triton; installs the rest.
#   bench/gpu.sh [RESULTS_DIR]          PYTHON=python3 by default
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
results=${1:-bench/results}
mkdir -p "$results"
failed=0

# step SECONDS NAME COMMAND...: runs it, keeps its output, goes on if it fails, and fails at the end.
step() {
  local limit=$1 name=$2
  shift 2
  echo "== $name"
  if ! timeout "$limit" "$@" 2>&1 | tee "$results/gpu-$name.log" | tail -n 40; then
    echo "== $name FAILED"
    failed=1
  fi
}

"$PYTHON" -c 'import torch; raise SystemExit(0 if torch.cuda.is_available() else "no GPU: torch.cuda.is_available() is False")' || exit 1
"$PYTHON" -m pip install --quiet --no-build-isolation --editable '.[test]' ||
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # no registry: run from the tree, with what there is
"$PYTHON" -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'

step 170 tests "$PYTHON" -m pytest -q -m "not package and not slow" -k cuda tests
step 60 check "$PYTHON" -m m2po_kernels check --device cuda
step 120 compare "$PYTHON" -m bench.compare --device cuda --seconds 4 --out "$results/gpu-compare.jsonl"
step 100 logits "$PYTHON" -m bench.logits --device cuda --seconds 4 --out "$results/gpu-logits.jsonl"
if command -v compute-sanitizer >/dev/null; then
  step 60 sanitizer compute-sanitizer --error-exitcode 1 "$PYTHON" -m pytest -q -x -k "cuda and triton" tests/test_worked_cases.py
fi
exit $failed
