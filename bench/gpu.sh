#!/usr/bin/env bash
# The whole GPU run in one command, under 8 minutes: tests, the oracle check, the benchmarks, compute-sanitizer where there is one.
#
#   bench/gpu.sh [RESULTS [WHEELHOUSE]]      RESULTS: bench/results by default; PYTHON=python3 by default
#
# Needs a python with a CUDA or ROCm build of torch >= 2.10 and triton. What else the tests want is installed from WHEELHOUSE, a
# folder of wheels, if one is given, else from pip's registry. Where that fails the tests fail, but the check and the benchmarks
# run: they need torch and triton alone. A wheelhouse is made where there is a network, by
#   pip download --dest WHEELHOUSE --only-binary :all: --no-deps -r bench/gpu-requirements.txt
#
# Rows are written as they are measured, to RESULTS/<gpu>-gpu-*.jsonl; a step that fails or runs out of time leaves what it has, the
# others still run, and the exit code is 1. Logs: RESULTS/gpu-logs.tar.gz. No step begins or goes on after 460 s.
# The backend cuda needs its compiled library: where nvcc is it is built, for this GPU alone (a minute); else it is carried along
# from where `make install` built it, for any torch >= 2.10: m2po_kernels/_cuda.so with _native.so and _build.json beside it.
# Without it the other backends run, and the run fails.
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
  local limit=$1 name=$2 code=0 left=$((460 - SECONDS))
  shift 2
  echo "== $name"
  if ((left < limit)); then limit=$left; fi
  if ((limit < 5)); then
    failed+=("$name: no time left")
    return 0
  fi
  timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1 || code=$?
  tail -n 30 "$logs/$name.log"
  if ((code == 124 || code == 137)); then
    failed+=("$name: cut off after $limit s")
  elif ((code != 0)); then
    failed+=("$name: exit code $code")
  fi
  return 0
}

# What is this GPU called, and what code does it run? The first import of torch on a cold machine can take most of a minute.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
about=$(timeout 90 "$PYTHON" -c '
import torch
from bench.machine import slug
if not torch.cuda.is_available():
    raise SystemExit("no GPU: torch.cuda.is_available() is False")
print(slug(torch.cuda.get_device_name()), "sm_%d%d" % torch.cuda.get_device_capability() if torch.version.cuda else "-")') || {
  code=$?
  if ((code == 124)); then echo "importing torch took more than 90 s" >&2; fi
  exit 1
}
read -r name arch <<<"$about"
if [[ -n $wheelhouse ]]; then
  step 25 install "$PYTHON" -m pip install --quiet --no-index --find-links "$wheelhouse" --no-deps -r bench/gpu-requirements.txt
else
  step 25 install "$PYTHON" -m pip install --quiet --no-deps --retries 0 --timeout 5 -r bench/gpu-requirements.txt
fi
# setup.py looks for nvcc, and says so where there is none.
if [[ $arch != - && ! -e m2po_kernels/_cuda.so ]]; then
  M2PO_BUILD=cuda M2PO_ARCHITECTURES=$arch step 100 build "$PYTHON" setup.py build_ext --inplace
fi
if [[ $arch != - ]]; then
  step 30 cuda "$PYTHON" -c 'import sys; from m2po_kernels.dispatch import why_not; sys.exit(why_not("cuda", "cuda"))'
fi
# First what nothing else can tell, then how fast it is.
step 50 check "$PYTHON" -m bench.check --device cuda --out "$logs/check.jsonl"
step 105 tokens "$PYTHON" -m bench.gpu_tokens --budget 80 --out "$results/$name-gpu-tokens.jsonl"
step 130 tests "$PYTHON" bench/gpu_tests.py
if command -v compute-sanitizer >/dev/null; then
  step 50 memcheck compute-sanitizer --error-exitcode 1 "$PYTHON" bench/sanitized.py cuda
  step 50 racecheck compute-sanitizer --tool racecheck --error-exitcode 1 "$PYTHON" bench/sanitized.py cuda
else
  echo "== sanitizer: compute-sanitizer is not installed"
fi
step 75 logits "$PYTHON" -m bench.gpu_logits --budget 55 --out "$results/$name-gpu-logits.jsonl"
tar -C "$results" -czf "$results/gpu-logs.tar.gz" gpu-logs && rm -r "$logs"
if ((${#failed[@]})); then
  printf 'FAILED %s\n' "${failed[@]}"
  exit 1
fi
