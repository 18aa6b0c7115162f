#!/usr/bin/env bash
# Does each algorithm learn on the laptop tier? 2 independently built bases x 3 seeds x math, tooluse
# x GRPO, SDPO; 512 held-out prompts, 8 samples each at T = 1. What exists is not run again.
#   runs/learning.sh [OUT]       about 40 minutes on two cores, 1 GB
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/learning} python=.venv/bin/python
export OMP_NUM_THREADS=1
mkdir -p "$out"
[ -d "$out/base0" ] || cp -r data/tiny_model "$out/base0"
[ -d "$out/base1" ] || $python tools/sft.py --tiny --seed 1 --out "$out/base1"
for base in 0 1; do for task in math tooluse; do
  for seed in 0 1 2; do for algorithm in grpo sdpo; do
    echo "--quiet --tiny --model $out/base$base --task $task --seed $seed --eval_every 0 --save_every 0" \
      "--out $out/$task-base$base-$algorithm-$seed $algorithm"
  done; done
done; done | while read -r line; do
  folder=$(sed -E 's/.*--out ([^ ]+) .*/\1/' <<<"$line")
  [ -d "$folder/ckpt-000060" ] || { rm -rf "$folder"; echo "train_${line##* }.py ${line% *}"; }
done | xargs -r -P 2 -L 1 $python
for base in 0 1; do for task in math tooluse; do
  echo "--tiny --tasks tiny_$task --baseline $out/base$base" \
    "--model $out/$task-base$base-grpo-0 $out/$task-base$base-grpo-1 $out/$task-base$base-grpo-2" \
    "$out/$task-base$base-sdpo-0 $out/$task-base$base-sdpo-1 $out/$task-base$base-sdpo-2" \
    "--limit 512 --n 8 --temperature 1 --top_p 1 --out $out/$task-base$base.json"
done; done | xargs -r -P 2 -L 1 $python eval.py
$python tools/plot.py learning "$out"
