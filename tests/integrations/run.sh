#!/usr/bin/env bash
# Tests of adapters against the real packages, each in its own environment: tests/integrations/run.sh trl verl ...
# An environment is made again when its requirements or torch change; the package is installed anew on each run.
# What stands in requirements-no-deps.txt is installed without what it depends on.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${PYTHON:=python3}" "${TORCH:=torch==2.13.0}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

for name in "$@"; do
  tests=tests/integrations/$name venv=build/integrations/$name
  wanted=$(echo "$TORCH" | cat - "$tests"/requirements*.txt | sha256sum)
  if [[ "$(cat "$venv/.made-for" 2>/dev/null)" != "$wanted" ]]; then
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv"
    # torch first and on its own, so that nothing after it chooses another. TORCH may hold options for pip.
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --quiet $TORCH
    "$venv/bin/python" -m pip install --quiet "setuptools>=77" wheel "pytest>=8" -r "$tests/requirements.txt"
    if [[ -f $tests/requirements-no-deps.txt ]]; then
      "$venv/bin/python" -m pip install --quiet --no-deps -r "$tests/requirements-no-deps.txt"
    fi
    echo "$wanted" >"$venv/.made-for"
  fi
  M2PO_BUILD=none "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
  # Not python -m pytest: that would import the package from here, not the installed one.
  "$venv/bin/pytest" -c tests/integrations/pytest.ini --rootdir tests/integrations --confcutdir tests/integrations "$tests"
done
