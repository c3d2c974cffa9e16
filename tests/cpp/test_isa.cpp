#include <gtest/gtest.h>

#include "cpu/isa.h"
#include "fold/error.h"

TEST(Isa, ForcingAnAvailableSetSticks) {
  const auto best = fold::cpu::isa();
  fold::cpu::set_isa(fold::cpu::Isa::portable);
  EXPECT_EQ(fold::cpu::isa(), fold::cpu::Isa::portable);
  fold::cpu::set_isa(best);
  EXPECT_EQ(fold::cpu::isa(), best);
}
