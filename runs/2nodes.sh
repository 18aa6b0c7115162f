#!/usr/bin/env bash
#SBATCH --job-name=denser --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --mem=0 --time=2-00:00:00 --signal=TERM@1800
# runs/8gpu.sh on two nodes of 8 GPUs, which see one file system:
#   sbatch runs/2nodes.sh ema5 math --model Qwen/Qwen3-14B
# Without Slurm, on each node: HEAD=host0 NODE=0 runs/2nodes.sh ema5 math, with NODE=1 on the other.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
nodes=${SLURM_JOB_NUM_NODES:-2} python=${PYTHON:-.venv/bin/python}
if [ -n "${SLURM_JOB_ID-}" ]; then
  HEAD=${HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
  node='$SLURM_NODEID' start="srun bash -c"
else
  node=${NODE:?0 or 1} start="bash -c"
fi
LAUNCH="$python -m torch.distributed.run --nnodes $nodes --node_rank $node --nproc_per_node ${GPUS:-8} --shutdown_timeout 1800"
LAUNCH+=" --master_addr ${HEAD:?host name of node 0} --master_port ${PORT:-29500}"
exec $start "LAUNCH=\"$LAUNCH\" exec runs/8gpu.sh $*"
