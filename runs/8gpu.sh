#!/usr/bin/env bash
#SBATCH --job-name=denser --nodes=1 --ntasks=1 --gpus-per-node=8 --cpus-per-task=64 --mem=800G --time=2-00:00:00 --signal=TERM@1800
# One run of the paper on 8 GPUs of 80 GB: Qwen3-4B, 50 steps of 32 prompts x 8 responses.
#   runs/8gpu.sh SETTING [TASK] [flags of the trainer]        or: sbatch runs/8gpu.sh ...
# SETTING: grpo, sdpo (frozen teacher), ema0.5 .. ema5, stable (a restart every 10 steps, as much as
# ema5 in 10), cot. TASK: math, science, tooluse, coding. A run that was killed goes on.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
setting=${1:?grpo, sdpo, ema0.5, ema1, ema2, ema5, stable or cot} task=${2:-math}
shift $(($# > 1 ? 2 : 1))
case $setting in
grpo) script=train_grpo.py flags= ;;
sdpo) script=train_sdpo.py flags= ;;
ema0.5) script=train_sdpo.py flags="--ema 0.005" ;;
ema[125]) script=train_sdpo.py flags="--ema 0.0${setting#ema}" ;;
stable) script=train_sdpo.py flags="--ema 0.05 --restart_every 10 --restart_mix matched" ;;
cot) script=train_sdpo.py flags="--think --cot" ;;
*) echo "runs/8gpu.sh: no setting $setting" >&2 && exit 2 ;;
esac
out=${OUT:-runs/$setting-$task} python=${PYTHON:-.venv/bin/python}
launch=${LAUNCH:-"$python -m torch.distributed.run --standalone --nproc_per_node ${GPUS:-8} --shutdown_timeout 1800"}
where="--out $out"
[ ! -f "$out/config.json" ] || where="--resume $out"
# shellcheck disable=SC2086
exec $launch $script --task "$task" $flags $where "$@"
