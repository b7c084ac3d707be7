#!/usr/bin/env bash
# Measure one GPU of 80 GB or more, without a network, in pieces of at most ten minutes:
#
#     bash experiments/bench/gpu_day.sh kernels train long decode staging sleeping quickstart evolve reader
#     PYTHON=python3 OUT=/tmp/gpu_day bash experiments/bench/gpu_day.sh train
#
# train prints the plan's figures beside what it measures, decode the roofline. sleeping needs vLLM: the
# interpreter of its environment is $VLLM. Each piece prints its table and leaves it in
# $OUT/PIECE.txt, line by line, so that a piece that is cut off leaves what it has. A case that fails
# says why in the table; the next ones still run.
set -u -o pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-runs/gpu_day}
VLLM=${VLLM:-.bench/vllm/bin/python}
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

long() {
  bench train --sizes 0.5b 1.5b --rows 32768
  bench train --sizes 7b --rows 4096 32768 --set lora.rank=32
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

# weights from the GPU to memory that servers share, of the shapes of 7B and 14B
staging() { bench staging; }

# a server on the learner's GPU that sleeps while it learns; engine/* of metrics.jsonl has the seconds
sleeping() {
  [[ -x $VLLM ]] || { echo "no vLLM at VLLM=$VLLM"; return; }
  "$PYTHON" run.py --config=configs/quickstart.py --config.steps=4 --config.questioning.budget=60 --config.eval.every=0 \
    --config.engine.name=vllm --config.engine.vllm.python="$VLLM" --config.engine.vllm.sleep=True \
    --config.engine.vllm.flags="--enforce-eager --gpu-memory-utilization 0.3" --workdir="$OUT/sleeping" &&
    grep -oE '"(engine/(sleep|stage|update)_seconds|time/sync)": [0-9.]+' "$OUT/sleeping/metrics.jsonl"
}

quickstart() { "$PYTHON" run.py --config=configs/quickstart.py --config.steps=20 --workdir="$OUT/quickstart"; }

PIECES="kernels train long decode staging sleeping quickstart evolve reader"
for piece in "$@"; do
  [[ " $PIECES " == *" $piece "* ]] || { echo "no piece $piece: $PIECES" >&2; exit 2; }
done
export -f bench "$@"
export PYTHON OUT VLLM
for piece in "$@"; do
  echo "== $piece: $("$PYTHON" -c 'import jax; print(jax.devices()[0].device_kind, "jax", jax.__version__)')"
  timeout -s INT "$LIMIT" bash -c "$piece" 2>&1 | tee "$OUT/$piece.txt"
done
