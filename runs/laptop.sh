#!/usr/bin/env bash
# The paper's experiments on two CPU cores: continual training, drift, every figure.
#   runs/laptop.sh             every part in turn
#   runs/laptop.sh SEED        one part: the runs of a seed on all bases, and the figures so far
#   runs/laptop.sh --quick     one base, one seed, shorter stages: results/quick
#   runs/laptop.sh --smoke     the same path in seconds, for the tests
# A run that is in $RESULTS is done; one that was stopped goes on from its checkpoints in $WORK.
# They are called METHOD-bBASE-sSEED, with -TASK behind it where that is the only stage.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# ---- settings: all that a part depends on; what is set outside wins (runs/paper.sh does that) ----
: "${BASES=0 1}" "${SEEDS=0 1 2 3 4}" "${JOBS=2}" "${RESULTS=results/laptop}" "${WORK=runs/laptop}"
: "${ORDER=math,science,tooluse,coding}" "${REORDER=tooluse,math,science,coding}" "${STEPS=40,40,40,20}"
: "${STEPS_ONE=40}" "${STEPS_CODING=20}" # of a run of one stage; as in STEPS
: "${GRPO_LR=1e-4}" "${SDPO_LR=3e-4}"    # grpo-equal takes SDPO's
: "${TRAIN=--tiny --quiet --eval_every 0 --save_every 20 --keep 1}"
: "${EVAL=--tasks tiny --n 4 --limit 128}" "${DRIFT=--tiny --n 16 --limit 32}"
: "${SEQUENCES=grpo grpo-equal sdpo sdpo-ema5 sdpo-hard sdpo-cot sdpo-ema5-mask sdpo-ema5-reorder}"
# what begins a sequence is no run of its own: the figures of one task take its first stage
: "${SINGLES=sdpo-ema0.5:math sdpo-ema1:math sdpo-ema2:math sdpo-matched:math
  sdpo:tooluse sdpo-ema0.5:tooluse sdpo-ema1:tooluse sdpo-ema2:tooluse sdpo-ema5:tooluse
  sdpo-matched:tooluse sdpo-hard:tooluse sdpo-cot:tooluse sdpo:science sdpo-cot:science
  sdpo:coding grpo:science grpo:tooluse grpo:coding}"
: "${MODEL=}" "${PYTHON=.venv/bin/python}" "${LAUNCH=$PYTHON}" # MODEL: the only base, at paper scale
case ${1-} in
--quick) BASES=0 SEEDS=0 RESULTS=results/quick WORK=runs/quick STEPS=30,30,30,12 STEPS_ONE=30
  STEPS_CODING=12 EVAL="--tasks tiny --n 4 --limit 48" DRIFT="--tiny --n 4 --limit 12" ;;
--smoke) BASES=0 SEEDS=0 ORDER=math,science STEPS=1 SEQUENCES="grpo sdpo" SINGLES='' SDPO_LR=1e-3
  TRAIN="--tiny --quiet --eval_every 0 --prompts 4 --group 4 --updates 1"
  EVAL="--tasks tiny_math,tiny_science,tiny_logic --n 2 --limit 4"
  DRIFT="--tiny --prompts tiny_math,tiny_science,tiny_logic --n 4 --limit 3" ;;
esac
export BASES JOBS RESULTS WORK ORDER REORDER STEPS STEPS_ONE STEPS_CODING GRPO_LR SDPO_LR TRAIN
export EVAL DRIFT MODEL PYTHON LAUNCH

flags() { # of a method
  case $1 in
  grpo) echo --algorithm grpo ;;
  grpo-equal) echo --algorithm grpo --updates 1 ;; # as many steps as SDPO, of the same size
  sdpo) ;;
  sdpo-ema0.5) echo --ema 0.005 ;;
  sdpo-ema[125]) echo --ema "0.0${1#sdpo-ema}" ;;
  sdpo-ema5-mask) echo --ema 0.05 --mask_ratio 0.5 ;;
  sdpo-ema5-reorder) echo --ema 0.05 ;;
  sdpo-matched) echo --ema 0.05 --restart_every 10 --restart_mix matched ;;
  sdpo-hard) echo --restart_every 10 ;;
  sdpo-cot) echo --think --cot ;;
  *) echo "runs/laptop.sh: no method $1" >&2 && exit 2 ;;
  esac
}

base() { # of a number: where its model is
  if [ -n "$MODEL" ]; then echo "$MODEL"; elif [ "$1" = 0 ]; then echo tiny; else echo "$WORK/base$1"; fi
}

one() { # a run: stages and scores, drift of each, the small files kept, the checkpoints deleted
  local failed='' name=$1 out=$WORK/$1 order=$ORDER steps=$STEPS lr=$SDPO_LR think='' method b seed task
  read -r method b seed task <<<"$(sed -E 's/^(.*)-b([0-9]+)-s([0-9]+)-?/\1 \2 \3 /' <<<"$name")"
  case $method in grpo) lr=$GRPO_LR ;; sdpo-cot) think=--think ;; *-reorder) order=$REORDER ;; esac
  [ -z "$task" ] || order=$task steps=$STEPS_ONE
  [ "$order" != coding ] || steps=$STEPS_CODING
  local scored=$WORK/base$b-eval$think # the scores of a base, for all of its runs
  rm -rf "$out/kept"
  # shellcheck disable=SC2046,SC2086
  $LAUNCH continual.py $TRAIN $EVAL --lr "$lr" $(flags "$method") --model "$(base "$b")" --seed "$seed" \
    --order "$order" --stage_steps "$steps" --out "$out" \
    $([ ! -f "$scored.json" ] || echo --base_eval "$scored.json") || failed=$?
  if [ ! -f "$out/continual.json" ]; then # a gradient that is not finite, or told to stop
    mkdir -p "$RESULTS/failed" && grep -h "FloatingPointError" "$WORK/$name.txt" >"$RESULTS/failed/$name.txt" ||
      rm -f "$RESULTS/failed/$name.txt"
    exit "${failed:-1}"
  fi
  for end in jsonl json; do
    cp "$out/eval-0.$end" "$scored.$$" && mv "$scored.$$" "$scored.$end"
  done
  # shellcheck disable=SC2086
  $PYTHON drift.py $DRIFT $think --base "$(base "$b")" --model "$out"/[1-9]-* --seed "$seed" \
    --out "$out/drift.json"
  $PYTHON tools/keep.py "$out" "$out/kept"
  mv "$out/kept" "$RESULTS/$name"
  rm -rf "$out"
  echo "$name: $SECONDS s" >&3
}

part() { # the runs of a seed; the long ones first, so that no core waits for the last of them
  local began=$SECONDS
  for b in $BASES; do
    [ -f "$(base "$b")/config.json" ] || [ -n "$MODEL" ] || [ "$b" = 0 ] ||
      $PYTHON tools/sft.py --tiny --seed "$b" --out "$(base "$b")"
  done
  { for run in $SEQUENCES $SINGLES; do for b in $BASES; do
      name=${run%:*}-b$b-s$1$([ "$run" = "${run#*:}" ] || echo "-${run#*:}")
      [ -d "$RESULTS/$name" ] || echo "$name"
  done; done; } | xargs -r -n 1 -P "$JOBS" runs/laptop.sh one || bad=1
  echo "part $1: $(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s" | tee -a "$RESULTS/times.txt"
}

main() { # read whole before it runs: the file may be edited meanwhile
  mkdir -p "$RESULTS" "$WORK"
  if [ "${1-}" = one ]; then # what it prints goes to a file; if it fails, its end to the screen
    text=$WORK/$2.txt
    exec 3>&1 4>&2 >"$text" 2>&1
    trap '[ $? = 0 ] || { echo "$text, failed:"; tail -n 5 "$text"; } >&4' EXIT
    one "$2"
    exit
  fi
  case ${1-} in '' | --*) ;; *) SEEDS=$1 ;; esac
  for seed in $SEEDS; do part "$seed"; done
  $PYTHON tools/plot.py paper "$RESULTS"
  exit "${bad:-0}" # 1: a run failed, the others are done
}
main "$@"
