#!/usr/bin/env bash
# Measure one GPU of 80 GB or more, without a network, in pieces of at most ten minutes:
#
#     bash experiments/bench/gpu_day.sh kernels train decode quickstart evolve reader
#     PYTHON=python3 OUT=/tmp/gpu_day bash experiments/bench/gpu_day.sh train
#
# Each piece prints its table and leaves it in $OUT/PIECE.txt, line by line, so that a piece that is
# cut off leaves what it has. A case that fails says why in the table; the next ones still run.
set -u -o pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-runs/gpu_day}
LIMIT=${LIMIT:-570} # seconds of a piece
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$OUT/jax}"

bench() { echo "+ $*"; "$PYTHON" -m "experiments.bench.$1" "${@:2}"; }

kernels() { bench kernels --kernels cudnn cudnn_apart cudnn_packed; }

train() {
  bench train --sizes 0.5b 1.5b --rows 4096 16384
  bench train --sizes 7b --rows 16384 --set lora.rank=32
  # the same with the kernel that masks whole rows, and with fewer activations recomputed
  bench train --sizes 7b --rows 16384 --set lora.rank=32 model.attention=cudnn
  XLA_FLAGS="${XLA_FLAGS:-} --xla_disable_hlo_passes=rematerialization" \
    bench train --sizes 7b --rows 16384 --set lora.rank=32 model.remat=dots
}

decode() {
  bench decode --contexts 2048 16384
  bench decode --contexts 2048 16384 --ragged
}

evolve() {
  PYTHONPATH="$PYTHONPATH:docs/examples" "$PYTHON" run.py --mode=evolve --config=configs/evolve_gpu.py:lending:Lending \
    --workdir="$OUT/evolve"
}

# SmolLM2-135M (`make pretrained`) learns to read tools in made-up worlds, and is measured in others
reader() {
  "$PYTHON" -m experiments.imitation --config=configs/reader_base.py:smollm2 --workdir="$OUT/reader"
  "$PYTHON" run.py --mode=eval --config=configs/evolve_gpu.py:made_up --config.questioning.enabled=False \
    --config.navigating.enabled=False --config.attributing.enabled=False --config.advantage.name=grpo \
    --config.eval.tasks=64 --config.eval.rollouts=1 --config.eval.temperatures='()' \
    --config.model.path="$OUT/reader/policy" --workdir="$OUT/reader_eval"
}

quickstart() { "$PYTHON" run.py --config=configs/quickstart.py --config.steps=20 --workdir="$OUT/quickstart"; }

for piece in "$@"; do
  [[ $piece =~ ^(kernels|train|decode|quickstart|evolve|reader)$ ]] || { echo "no piece $piece: kernels, train, decode, quickstart, evolve, reader" >&2; exit 2; }
done
export -f bench "$@"
export PYTHON OUT
for piece in "$@"; do
  echo "== $piece: $("$PYTHON" -c 'import jax; print(jax.devices()[0].device_kind, "jax", jax.__version__)')"
  timeout -s INT "$LIMIT" bash -c "$piece" 2>&1 | tee "$OUT/$piece.txt"
done
