#!/usr/bin/env bash
# The table of README's "Speed and memory": steps of ours and of TRL in turn, one thread each.
#   runs/bench.sh MODEL [OUT]     MODEL: SmolLM2-135M-Instruct (folder or .gguf); 16 GB free,
#   trl==1.16.0 installed; 25 minutes for the short prompts, 75 for the long, 20 for the rest
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?folder or .gguf of SmolLM2-135M-Instruct} out=${2:-results/bench.json}
bench() { .venv/bin/python tools/bench.py "$@" --out "$out"; }
for algorithm in grpo sdpo; do
  bench $algorithm --peer trl --case tiny --prompts 16 --max_new 64 --free --steps 9
  bench $algorithm --peer trl --model "$model" --tokens_per_micro 1024
done
# micro-batches of as many tokens: 2 rows of TRL's, 2048 tokens of ours
long=(--peer trl --model "$model" --case tools --max_new 64 --warm 0 --tokens_per_micro 2048
  --checkpoint_activations)
for algorithm in grpo sdpo; do
  bench $algorithm "${long[@]}" --steps 3 --accumulate 16
done
bench grpo "${long[@]}" --steps 1 --accumulate 4 # the peer with 8 rows at a time
bench grpo "${long[@]}" --steps 1 --accumulate 16 --free --rewards real
bench head
bench growth --steps 3
