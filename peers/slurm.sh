#!/bin/bash
# An array of peers on a cluster that takes its machines back: each element is one peer with a state folder of its own.
#
#   sbatch --export=ALL,ADDR=/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW... peers/slurm.sh
#
# A minute before the limit SLURM sends SIGUSR1; the peer contributes what is unmerged, saves, and ends within 20 s. So it
# does if the job is preempted (SIGTERM). A requeued element goes on from its own folder.
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
: "${ADDR:?say --export=ALL,ADDR=..., as p2pdiloco bootstrap prints it}"
STATE=${STATE:-$HOME/.local/state/p2pdiloco}/slurm-${SLURM_ARRAY_TASK_ID:-0}

# exec: the signal for the batch shell (B:) reaches the peer itself. The model is served by those who stay on.
# shellcheck disable=SC2086  # several addresses, several options
exec "${P2PDILOCO:-p2pdiloco}" join $ADDR --state "$STATE" --stay-s 0 ${OPTIONS:---device cuda}
