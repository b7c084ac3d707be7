#!/bin/bash
# One run on the nodes of a Slurm job, one process a node, which has all of its GPUs.
#
#     sbatch --nodes=2 --gpus-per-node=8 experiments/launch/slurm.sh --config=configs/mine.py --workdir=runs/mine
#     experiments/launch/slurm.sh --dry-run --config=configs/mine.py    # prints what each node would run
#
# The job starts again, and the run goes on, after exit code 75 (another process was lost), after
# preemption, and after the time limit, five minutes before which the run is told to save and end.
# A job that is cancelled stays so.
#SBATCH --job-name=evolver
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@300
set -u

python=${PYTHON:-.venv/bin/python}
# What each node evaluates. One process a node: with config.hosts.count=0, JAX would give each process one GPU alone.
# shellcheck disable=SC2016
hosts='--config.hosts.count=$SLURM_NNODES --config.hosts.index=$SLURM_PROCID --config.hosts.coordinator=$COORDINATOR'

if [[ ${1:-} == --dry-run ]]; then
    shift
    printf 'exec %q run.py %s' "$python" "$hosts"
    printf ' %q' "$@"
    printf '\n'
    exit
fi
if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "this is no Slurm job: start it with sbatch, or see what it would run with --dry-run" >&2
    exit 2
fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export COORDINATOR=$first:$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=0 bash -c "exec \"\$0\" run.py $hosts \"\$@\"" "$python" "$@" &
srun=$!
stopped=
trap 'stopped=1; kill -TERM $srun' USR1
wait $srun
code=$?
if [[ $stopped ]]; then
    wait $srun # the first wait ended with the signal
    code=$?
    # The run may have ended by itself meanwhile: done, or failed as it would again.
    ((code <= 3)) || code=75
fi
if ((code == 75)); then
    echo "the job starts again" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
