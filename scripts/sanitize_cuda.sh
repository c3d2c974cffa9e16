#!/usr/bin/env bash
# Runs short CUDA tests under NVIDIA's compute-sanitizer:
#
#     scripts/sanitize_cuda.sh build/cuda [TOOL...]     # memcheck, synccheck and initcheck by default
#
# Masks, packed sequences, poison and empty sides; decode at many lengths, with second runs; fits; whole steps: on
# inputs small enough for tools that slow a kernel down a hundred times.
# It fails if a test does, or a tool has something to say. racecheck has to be asked for: it does not follow copies that
# complete a barrier, nor a warp that meets in __syncwarp before one of its lanes arrives at a barrier for all, and takes
# both for races.
set -euo pipefail
build=$1
shift
tools=("$@")
(($#)) || tools=(memcheck synccheck initcheck)

forward='*/gqa_257_*:*/fewer_queries_37_bf16:*/window_both_sides_300_f16:*/sinks_window_350_bf16:*/many_items_140_f16'
forward+=':*/wide_window_350_f16:*ForwardRowsWithoutAKey:*ForwardNothingToDo'
layouts='Dims/ForwardPacked.*:*ForwardLengthsThatMakeNoSenseStayInside'
backward='*OneKey*:*RowsThatSeeNothing*:*EmptySides:*PackedSequences*:*StridesChangeNoBit:*CanBeCapturedInAGraph'
backward+=':*MaskedKeysAndRows*'

decode='*LengthsAndBits*:*WindowsAndSinks*:*DraftsAndTrees*:*WrongReferencesRunAgain*:*PoisonStaysWithItsRows*'
decode+=':*HaveTheCpusBytes/24' # head dim 256

fits='*FitsAtMarks:*FitsOfSpecialContent'

for tool in "${tools[@]}"; do
  for test in "attention_forward $forward" "attention_forward_layouts $layouts" "attention_backward $backward" \
    "decode $decode" "cache_write_fits $fits" 'step *'; do
    read -r name filter <<<"$test"
    echo "== $tool, $name"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/cuda_test_$name" --gtest_brief=1 --gtest_filter="$filter"
  done
done
