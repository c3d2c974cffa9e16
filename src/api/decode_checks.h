#pragma once
#include "fold/decode.h"
#include "plan/decode_params.h"

namespace fold::api {

/// Everything that decode() checks, and what it then runs; the views behind it must outlive it.
plan::DecodeParams checked_decode(const CacheStorage& cache, const DecodeArgs& args, const DecodeResults& results);

}  // namespace fold::api
