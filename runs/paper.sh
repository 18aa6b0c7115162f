#!/usr/bin/env bash
#SBATCH --job-name=denser --array=0-2
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=8 --cpus-per-task=64 --mem=1000G --time=14-00:00:00 --signal=TERM@1800
# runs/laptop.sh at the paper's scale: Qwen3-4B on 8 GPUs of 80 GB, a seed for each task of the array.
#   sbatch runs/paper.sh       or, on such a node: runs/paper.sh SEED
# A job that is killed goes on when it is submitted again. Needs vllm, matplotlib and
# sentence-transformers, 300 GB in $WORK, and what setup says of data sets behind a login (GPQA).
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
export MODEL=${MODEL:-Qwen/Qwen3-4B} BASES=0 SEEDS="0 1 2" JOBS=1 PYTHON=${PYTHON:-.venv/bin/python}
export RESULTS=${RESULTS:-results/paper} WORK=${WORK:-runs/paper}
export LAUNCH=${LAUNCH:-"$PYTHON -m torch.distributed.run --standalone --nproc_per_node 8 --shutdown_timeout 1800 --"} # --: else it takes --n for its own
export STEPS=50,50,50,20 STEPS_ONE=50 STEPS_CODING=20 GRPO_LR=1e-6 SDPO_LR=1e-5
export TRAIN="--eval_every 0 --save_every 10 --keep 1" # the rest are the trainers' own defaults
export EVAL="--tasks paper --n 16"
export DRIFT="--prompts math,science,tooluse,coding,aime24,aime25,sciknoweval,toolalpaca,dolci,math500,gpqa,bfcl,lcb,zebra,mmlu_redux
  --n 16 --limit 32 --embedder Qwen/Qwen3-Embedding-4B"
exec runs/laptop.sh "${1:-${SLURM_ARRAY_TASK_ID:-}}"
