#!/bin/sh
# Train the two models that `wqk demo` scores: sh examples/train_demo_pair.sh wikipedia.jsonl.xz demo
#
# An encoder and a decoder with the same four pre-norm layers start from the same weights and see the
# same blocks of the same text, character by character. They differ in one thing: the encoder predicts
# masked characters from both sides, the decoder each next character from its left. Short blocks and
# larger initial weights make a quick start; strong weight decay wears off the random start, whose
# forms are neither symmetric nor directional. Some ten minutes each on a quiet core.
set -e
text=$1 out=$2

wqk lab corpus "$text" --text characters --max-characters 8200000 --held-out 32 -o "$out/corpus"
for mode in encoder decoder; do
    wqk lab train --mode $mode --width 128 --block 32 --steps 4000 --initial-std 0.06 --weight-decay 1 \
        --threads 1 --corpus "$out/corpus" -o "$out/$mode"
done
python "$(dirname "$0")/keep_queries_and_keys.py" "$out"
