#!/bin/bash
# One run of several processes on this machine, each with simulated devices: a cluster to try things on.
#
#     experiments/launch/here.sh 2 4 --config=configs/quickstart.py --config.mesh.fsdp=8    # 2 processes, 4 devices each
#
# The first process prints. Ctrl-C and SIGTERM reach all of them. The exit code is that of the first one that fails.
set -u

if [[ ! ${1:-} =~ ^[1-9][0-9]*$ || ! ${2:-} =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 PROCESSES DEVICES --config=..." >&2
    exit 2
fi
processes=$1 devices=$2 port=$((20000 + $$ % 10000))
shift 2
export JAX_PLATFORMS=cpu XLA_FLAGS="--xla_force_host_platform_device_count=$devices${XLA_FLAGS:+ $XLA_FLAGS}"
pids=()
for ((i = 0; i < processes; i++)); do
    "${PYTHON:-.venv/bin/python}" run.py --config.hosts.count="$processes" --config.hosts.index="$i" \
        --config.hosts.coordinator=127.0.0.1:"$port" "$@" &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT

code=0
for pid in "${pids[@]}"; do
    wait "$pid"
    ended=$?
    while kill -0 "$pid" 2>/dev/null; do # a signal ended the wait, not the process
        wait "$pid"
        ended=$?
    done
    ((code)) || code=$ended
done
exit "$code"
