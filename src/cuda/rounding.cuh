#pragma once

namespace fold::cuda {

/// Adding it rounds a float below 2^22 in magnitude to an integer, ties to even, and leaves that in the low bits.
constexpr float kRoundMagicFloat = 0x1.8p+23f;
/// Its bits: an integer added to them adds to the float.
constexpr int kRoundMagic = 0x4B400000;

}  // namespace fold::cuda
