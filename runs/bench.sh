#!/usr/bin/env bash
# The table of README's "Speed and memory": steps of ours and of TRL in turn, one thread each.
#   runs/bench.sh MODEL [OUT]     MODEL: SmolLM2-135M-Instruct (folder or .gguf); a quiet machine,
#   16 GB, pip install trl==1.16.0 --no-deps; about 25 minutes for `sums`, 2 hours for all
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?folder or .gguf of SmolLM2-135M-Instruct} out=${2:-results/bench.json}
bench() { .venv/bin/python tools/bench.py "$@" --out "$out"; }
for algorithm in grpo sdpo; do
  bench $algorithm --peer trl --case tiny --prompts 8 --max_new 64 --free
  bench $algorithm --peer trl --model "$model" --tokens_per_micro 1024
done
for algorithm in grpo sdpo; do
  bench $algorithm --peer trl --model "$model" --case tools --max_new 64 --steps 3 --warm 0 \
    --accumulate 16 --tokens_per_micro 2048
  bench $algorithm --peer trl --model "$model" --case tools --max_new 64 --steps 3 --warm 0 \
    --accumulate 16 --tokens_per_micro 2048 --free --rewards real
done
bench head
bench growth --steps 3
