#!/usr/bin/env bash
# The whole GPU run in one command, under 8 minutes: tests, the oracle check, the benchmarks, compute-sanitizer where there is one.
#
#   bench/gpu.sh [RESULTS [WHEELHOUSE]]      RESULTS: bench/results by default; PYTHON=python3 by default
#
# Needs a python with a CUDA or ROCm build of torch >= 2.10 and triton. What else the tests want is installed from WHEELHOUSE, a
# folder of wheels, if one is given, else from pip's registry. Where that fails the tests do not run, which fails the run, but
# the check and the benchmarks do: they need torch and triton alone. A wheelhouse is made where there is a network, by
#   pip download --dest WHEELHOUSE --only-binary :all: --no-deps -r bench/gpu-requirements.txt
#
# Rows are written as they are measured, to RESULTS/<gpu>-gpu-*.jsonl; a step that fails or runs out of time leaves what it has, the
# others still run, and the exit code is 1. Logs: RESULTS/gpu-logs/. The limits of all steps add up to 475 s.
# The backend cuda needs its compiled library, m2po_kernels/_cuda.so: `make install` builds it where nvcc is, for any torch >= 2.10, and
# it may be copied from there with m2po_kernels/_build.json. Without it the other backends run, and the run fails.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
results=${1:-bench/results}
wheelhouse=${2:-}
logs=$results/gpu-logs
mkdir -p "$logs"
failed=()

# step SECONDS NAME COMMAND...: runs it, keeps its output in a log, shows the end of it, and notes a failure.
step() {
  local limit=$1 name=$2 code=0
  shift 2
  echo "== $name"
  timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1 || code=$?
  tail -n 30 "$logs/$name.log"
  if ((code == 124 || code == 137)); then
    failed+=("$name: cut off after $limit s")
  elif ((code != 0)); then
    failed+=("$name: exit code $code")
  fi
  return 0
}

timeout 10 "$PYTHON" -c 'import torch; raise SystemExit(0 if torch.cuda.is_available() else "no GPU: torch.cuda.is_available() is False")' || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n $wheelhouse ]]; then
  step 25 install "$PYTHON" -m pip install --quiet --no-index --find-links "$wheelhouse" --no-deps -r bench/gpu-requirements.txt
else
  step 25 install "$PYTHON" -m pip install --quiet --no-deps --retries 0 --timeout 5 -r bench/gpu-requirements.txt
fi
name=$("$PYTHON" -c 'import torch; from bench.machine import slug; print(slug(torch.cuda.get_device_name()))')
"$PYTHON" -c 'import sys, torch; from m2po_kernels.dispatch import why_not; sys.exit(torch.version.cuda and why_not("cuda", "cuda"))' ||
  failed+=("cuda: not run, for the reason above")
if "$PYTHON" -c 'import pytest, hypothesis, expecttest, safetensors'; then
  step 140 tests "$PYTHON" bench/gpu_tests.py
else
  failed+=("tests: not run, for want of the module named above")
fi
# The cases of m2po check, without the libraries of its command line.
step 60 check "$PYTHON" -m bench.check --device cuda --out "$logs/check.jsonl"
step 110 tokens "$PYTHON" -m bench.gpu_tokens --budget 85 --out "$results/$name-gpu-tokens.jsonl"
step 80 logits "$PYTHON" -m bench.gpu_logits --budget 60 --out "$results/$name-gpu-logits.jsonl"
if command -v compute-sanitizer >/dev/null; then
  step 30 memcheck compute-sanitizer --error-exitcode 1 "$PYTHON" bench/sanitized.py
  step 30 racecheck compute-sanitizer --tool racecheck --error-exitcode 1 "$PYTHON" bench/sanitized.py
else
  echo "== sanitizer: compute-sanitizer is not installed"
fi
if ((${#failed[@]})); then
  printf 'FAILED %s\n' "${failed[@]}"
  exit 1
fi
