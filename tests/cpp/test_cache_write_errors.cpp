#include <gtest/gtest.h>

#include "cache_testing.h"

// Refused cache writes: the message, and that no byte of the pool changed.
namespace {

using namespace fold;
using namespace fold::testing;

CacheLayout small(int64_t page_size = 64) { return {.n_kv_heads = 2, .head_dim = 64, .page_size = page_size}; }

/// One request of three tokens behind 62 keys, to be spoilt in one place.
struct Call {
  Call() : tokens(3, 2, 64, 13), pool(small(), 4) {}
  void run() {
    cache_write(pool.storage(), {.k = k,
                                 .v = v,
                                 .block_table = block_table,
                                 .seqlens = vector_view(seqlens),
                                 .cu_seqlens = vector_view(cu),
                                 .slot_mapping = slot_mapping});
  }
  Tokens tokens;
  Pool pool;
  std::vector<int32_t> table{3, 1, 2, 0}, seqlens{62, 10}, cu{0, 3, 3};
  std::vector<int64_t> slots{3 * 64 + 62, 3 * 64 + 63, 64};
  TensorView k{tokens.k.data(), DType::f32, {3, 2, 64}}, v{tokens.v.data(), DType::f32, {3, 2, 64}};
  TensorView block_table{table.data(), DType::i32, {2, 2}};
  TensorView slot_mapping{slots.data(), DType::i64, {3}};
};

struct BadCall {
  void (*spoil)(Call&);
  const char* message;
  Error::Kind kind = Error::Kind::value;
};

constexpr auto kType = Error::Kind::type;
const BadCall kBadCalls[] = {
    {[](Call& c) { c.k.ndim = 2; }, "k.ndim=2; supported: 3"},
    {[](Call& c) { c.v = {}; }, "v=nothing; a tensor is required"},
    {[](Call& c) { c.k.dtype = DType::i32; }, "k.dtype=int32; supported: float32, bfloat16, float16", kType},
    {[](Call& c) { c.v.device = Device::cuda; }, "v.device=cuda; supported: cpu", kType},
    {[](Call& c) { c.v.shape[0] = 2; }, "v.shape=(2, 2, 64); dimension 0 must be 3 (tokens of k)"},
    {[](Call& c) { c.k.shape[1] = 1; }, "k.shape=(3, 1, 64); dimension 1 must be 2 (the cache's n_kv_heads)"},
    {[](Call& c) { c.k.shape[2] = 32; }, "k.shape=(3, 2, 32); dimension 2 must be 64 (the cache's head_dim)"},
    {[](Call& c) { c.v.strides[2] = 2; }, "v.stride(-1)=2; must be 1"},
    {[](Call& c) { c.block_table.dtype = DType::i64; }, "block_table.dtype=int64; supported: int32", kType},
    {[](Call& c) { c.block_table.ndim = 1; }, "block_table.ndim=1; supported: 2"},
    {[](Call& c) { c.seqlens = {62}; }, "seqlens.shape=(1); dimension 0 must be 2 (batch of block_table)"},
    {[](Call& c) {
       c.cu = {0, 3};
     },
     "cu_seqlens.shape=(2); dimension 0 must be 3 (batch + 1)"},
    {[](Call& c) {
       c.cu = {1, 3, 3};
     },
     "cu_seqlens[0]=1; must be 0"},
    {[](Call& c) {
       c.cu = {0, 3, 2};
     },
     "cu_seqlens[2]=2; must not be below cu_seqlens[1]=3"},
    {[](Call& c) {
       c.cu = {0, 3, 4};
     },
     "cu_seqlens[2]=4; at most the tokens of k, 3"},
    {[](Call& c) { c.seqlens[1] = -1; }, "seqlens[1]=-1; at least 0"},
    {[](Call& c) { c.seqlens[0] = 126; }, "keys of request 0=129; block_table has room for 128"},
    {[](Call& c) { c.seqlens[0] = 2147483646; }, "keys of request 0=2147483649; at most 2147483647"},
    {[](Call& c) { c.table[1] = 4; }, "block_table[0][1]=4; page ids 0..3"},
    {[](Call& c) { c.table[0] = -1; }, "block_table[0][0]=-1; page ids 0..3"},
    {[](Call& c) { c.table[1] = 2147480000; }, "block_table[0][1]=2147480000; page ids 0..3"},
    {[](Call& c) { c.slots[1] = -2; }, "slot_mapping[1]=-2; -1 (padding) or more"},
    {[](Call& c) { c.slots[2] = 65; }, "slot_mapping[2]=65; block_table puts position 64 of request 0 at 64"},
    {[](Call& c) { c.slots[0] = -1; }, "slot_mapping[1]=255; block_table puts position 62 of request 0 at 254"},
    {[](Call& c) { c.slot_mapping.shape[0] = 2; }, "slot_mapping.shape=(2); dimension 0 must be 3 (tokens of k)"},
    {[](Call& c) { c.slot_mapping.dtype = DType::i32; }, "slot_mapping.dtype=int32; supported: int64", kType},
    {[](Call& c) {
       c.table[1] = 3;
       c.slot_mapping = {};
       c.seqlens[0] = 63;
       c.cu = {0, 1, 3};
       c.seqlens[1] = 0;
       c.table[2] = 3;
     },
     "page of request 1=3; request 0 writes the same slots of it"},
    // Request 1 would write in front of request 0's new keys, into the block that those complete.
    {[](Call& c) {
       c.slot_mapping = {};
       c.cu = {0, 2, 3};
       c.seqlens[1] = 5;
       c.table[2] = 3;
     },
     "page of request 1=3; request 0 writes the same slots of it"},
    {[](Call& c) {
       c.table[1] = 3;
       c.slot_mapping = {};
       c.seqlens[0] = 64 - 2;
     },
     "page of request 0=3; request 0 writes the same slots of it"},
};

TEST(CacheWriteErrors, BadArgumentsAreNamedAndNothingIsWritten) {
  for (const BadCall& bad : kBadCalls) {
    Call call;
    bad.spoil(call);
    const std::vector<uint8_t> before = call.pool.bytes;
    try {
      call.run();
      ADD_FAILURE() << "accepted: " << bad.message;
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), bad.message);
      EXPECT_EQ(e.kind(), bad.kind) << bad.message;
    }
    EXPECT_TRUE(call.pool.bytes == before) << bad.message;
  }
}

TEST(CacheWriteErrors, TheUnspoiltCallIsAccepted) {
  Call call;
  EXPECT_NO_THROW(call.run());
  Call shared;  // two requests on one page, in blocks of their own
  shared.pool = Pool(small(128), 2);
  shared.table = {0, 1, 0, 1};
  shared.slot_mapping = {};
  shared.seqlens = {0, 64};
  shared.cu = {0, 1, 3};
  EXPECT_NO_THROW(shared.run());
}

/// Pages behind the new keys need not exist, unless the call reaches a mark and its fit reads them.
TEST(CacheWriteErrors, OnlyPagesThatAreTouchedAreChecked) {
  Tokens tokens(2, 2, 64, 14);
  std::vector<int32_t> table(17, 2147480000);
  table[15] = 0;
  table[16] = 1;
  Pool pool(small(), 2);
  EXPECT_NO_THROW(write(pool.storage(), table, 1021, tokens, 0, 2));
  EXPECT_NO_THROW(write(pool.storage(), table, 1024, tokens, 0, 2));
  const std::vector<uint8_t> before = pool.bytes;
  EXPECT_THROW(write(pool.storage(), table, 1023, tokens, 0, 2), Error);
  EXPECT_EQ(pool.bytes, before);
}

}  // namespace
