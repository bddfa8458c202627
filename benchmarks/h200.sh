#!/usr/bin/env bash
# The commands behind the tables of one H200, most important first; about 15 minutes in all.
#   bash benchmarks/h200.sh [1 2 3 4 5 6]  parts to run (without numbers 1 2 3)
# COMMIT=<hash> where git cannot tell; RESULTS=<folder> instead of benchmarks/results; TEXT=<file> is
# the prose that models learn from (benchmarks/prose.py makes it); ARMS="<arm> ..." are those that
# parts 5 and 6 learn with, so that several GPUs may share them. A row is there when its arm is done.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RESULTS=${RESULTS:-benchmarks/results}
bench() { python -m hirank.bench "$@" --out "$RESULTS" ${COMMIT:+--commit "$COMMIT"}; }

STEP="model --model qwen3-8b --seq 4096"
ONE="$STEP --accumulation 1 --optimizer off"
TRIO=peft-lora,peft-dora,hirank-dora
FIVE=base,peft-lora,peft-dora,hirank-lora,hirank-dora

part1() {  # the headline: whole steps, one micro-batch with all arms, prefill
  bench $STEP --rank 384,16 --accumulation 8 --optimizer on --checkpointing on --loss-tokens 1024 \
    --saved-tokens 0 --arms $TRIO --repeats 2
  bench $ONE --rank 384,16 --checkpointing on --loss-tokens 1024 --arms $FIVE --repeats 3
  bench prefill --model qwen3-8b --rank 384 --seq 4096 --arms $FIVE --repeats 5
}
part2() {  # decoding, convergence, and the parts
  bench decode --model qwen3-8b --rank 384 --prompt 128 --new 8 --batch 1,8 --arms $FIVE --repeats 2
  bench convergence --model small --text "${TEXT:-prose.txt}" --rank 64 --seq 512 --batch 8 \
    --steps 500 --lr 5e-4 --pretrain 150
  bench norm --shape 4096x12288 --rank 384
  bench compose
  bench layer --shape qwen3-8b --rank 384 --arms $FIVE --repeats 5
  bench init --model qwen3-8b --rank 384 --repeats 2
}
part3() {  # a 30B-class model, and the other settings of the 8B one
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True bench model --model qwen3-32b --seq 4096 \
    --rank 384 --accumulation 1 --optimizer on --checkpointing on --loss-tokens 1024 \
    --saved-tokens 0 --arms $TRIO --repeats 2
  bench $ONE --rank 384 --checkpointing off --loss-tokens 1024 --arms $TRIO --repeats 2
  bench $ONE --rank 384 --checkpointing on --loss-tokens 0 --arms $TRIO --repeats 2 --saved-tokens 0
  bench $ONE --rank 384 --checkpointing on --loss-tokens 1024 --dropout 0.05 --arms $TRIO --repeats 2
  bench $ONE --rank 64,768 --checkpointing on --loss-tokens 1024 --arms $TRIO --repeats 2
}

SEVEN="optim --model llama-7b,qwen2.5-7b --rank 1024 --seq 2048"

part4() {  # all weights of a 7B: memory and seconds of a step; the last line takes minutes of SVDs
  bench $SEVEN --arms adamw,adamw-8bit,hirank-galore,hirank-galore-int4,hirank-qgalore --repeats 8
  bench $SEVEN --arms adamw-8bit,hirank-galore,hirank-qgalore --repeats 40 --stagger on --gap 40
  bench $SEVEN --model llama-7b --arms galore-torch-8bit --repeats 3 --refreshes 0
}

OURS="hirank-galore hirank-galore-two hirank-qgalore hirank-fira hirank-apollo"
OURS+=" hirank-galore-int4 hirank-galore-two-int4"
ARMS=${ARMS:-adamw galore-torch $OURS}
LEARN="pretrain --text ${TEXT:-prose.txt} --vocab 8192 --hidden 512 --layers 8 --heads 8 --seq 256"
LEARN+=" --batch 64 --rank 128 --gap 200"
SHORT=400

part5() {  # a small Llama learns a text: the learning rate of each arm, short runs
  for arm in $ARMS; do
    case $arm in
      adamw) bench $LEARN --steps $SHORT --arms $arm --adamw-lr 0.0005,0.001,0.002 ;;
      *) bench $LEARN --steps $SHORT --arms $arm --lr 0.002,0.004,0.008 ;;
    esac
  done
}
part6() {  # the same for 33 million tokens, each arm with the learning rate that part 5 found best
  for arm in $ARMS; do
    bench $LEARN --steps 2000 --arms $arm $(python benchmarks/best_lr.py "$RESULTS" $arm $SHORT)
  done
}

for part in "${@:-1 2 3}"; do for one in $part; do "part$one"; done; done
