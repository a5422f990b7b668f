#!/usr/bin/env bash
# Make the environment of SGLang 0.5.23, once, outside the clone, and print its folder:
# ~/.cache/eyas/venvs/sglang-DIGEST, DIGEST of this script and the Python version, that is of all that decides its content.
# About 11 GB stay (PyPI's SGLang brings CUDA's libraries); it runs without a GPU with `--device cpu`.
set -euo pipefail
python=${PYTHON:-python3}
digest=$( (cat "$0"; "$python" -VV) | sha256sum | cut -c1-12)
venvs=$HOME/.cache/eyas/venvs
venv=$venvs/sglang-$digest
mkdir -p "$venvs"
exec 9>"$venv.lock"
flock 9
if [ ! -e "$venv/.made" ]; then
  echo "making $venv: SGLang, 11 GB, some minutes" >&2
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip --quiet --disable-pip-version-check install sglang==0.5.23 >&2
  touch "$venv/.made"
fi
echo "$venv"
