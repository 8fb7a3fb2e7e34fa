#!/bin/bash
# An array of peers on a cluster that takes its machines back: each element is one peer with a state folder of its own.
#
#   export P2PDILOCO_INVITE=...                 (as start prints it; the environment is not on a command line)
#   sbatch --export=ALL peers/slurm.sh
#
# A minute before the limit SLURM sends SIGUSR1; the peer contributes what is unmerged, saves, and ends within 20 s. So it
# does if the job is preempted (SIGTERM). In both cases the element is queued again, and goes on from its own folder.
#SBATCH --job-name=p2pdiloco
#SBATCH --array=0-7
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=p2pdiloco-%A_%a.log

set -euo pipefail
: "${P2PDILOCO_INVITE:?export P2PDILOCO_INVITE=... and say --export=ALL; start prints it}"
STATE=${STATE:-$HOME/.local/state/p2pdiloco}/slurm-${SLURM_ARRAY_TASK_ID:-0}

# The signals for the batch shell (B:) go on to the peer. The model is served by those who stay on.
peer=
early=
is_time_up=
forward() {
    if [ -n "$peer" ]; then kill -s "$1" "$peer"; else early=$1; fi
}
trap 'is_time_up=yes; forward USR1' USR1
trap 'forward TERM' TERM INT
# shellcheck disable=SC2086  # several options
"${P2PDILOCO:-p2pdiloco}" join --state "$STATE" --stay-s 0 ${OPTIONS:---device cuda} &
peer=$!
if [ -n "$early" ]; then forward "$early"; fi
status=0
while :; do # a signal interrupts wait
    wait "$peer" && status=0 || status=$?
    kill -0 "$peer" 2>/dev/null || break
done
# SLURM queues preempted jobs again by itself, but not those whose time is up.
if [ -n "$is_time_up" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
