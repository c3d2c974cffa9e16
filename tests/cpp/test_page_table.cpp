#include <gtest/gtest.h>

#include <map>
#include <random>

#include "fold/page_table.h"

namespace {

using fold::PageTable;
using Ids = std::vector<int64_t>;
using Ids32 = std::vector<int32_t>;

/// Everything a table can be asked, so that two of them can be compared.
struct State {
  Ids requests, lengths;
  std::vector<std::vector<int32_t>> pages;
  int64_t free;
  bool operator==(const State&) const = default;
};

State state(const PageTable& table) {
  State s{table.requests(), {}, {}, table.free_pages()};
  for (const int64_t id : s.requests) {
    s.lengths.push_back(table.length(id));
    const auto pages = table.pages(id);
    s.pages.emplace_back(pages.begin(), pages.end());
  }
  return s;
}

template <typename F>
std::string refused(PageTable& table, F call) {
  const State before = state(table);
  try {
    call();
  } catch (const fold::Error& e) {
    EXPECT_EQ(state(table), before) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

auto extend(PageTable& table, int64_t id, int64_t tokens) { return table.extend(Ids{id}, Ids{tokens}); }
void truncate(PageTable& table, int64_t id, int64_t length) { table.truncate(Ids{id}, Ids{length}); }

TEST(PageTable, GrowsByPagesAndShrinksByPages) {
  PageTable table(10, 64, 640);
  const int64_t id = table.add_request();
  EXPECT_EQ(table.pages(id).size(), 0u);
  for (const auto& [tokens, pages] : std::vector<std::pair<int64_t, size_t>>{{0, 0}, {1, 1}, {62, 1}, {1, 1}, {1, 2}}) {
    EXPECT_TRUE(extend(table, id, tokens).empty());
    EXPECT_EQ(table.pages(id).size(), pages);
  }
  EXPECT_EQ(table.length(id), 65);
  truncate(table, id, 64);
  EXPECT_EQ(table.pages(id).size(), 1u);
  truncate(table, id, 0);
  EXPECT_EQ(table.free_pages(), 10);
}

TEST(PageTable, ForkSharesPagesAndCopiesTheOneThatIsWritten) {
  PageTable table(10, 64, 640);
  const int64_t parent = table.add_request();
  extend(table, parent, 130);
  const int64_t child = table.fork(parent);
  EXPECT_EQ(table.free_pages(), 7);
  const std::vector<int32_t> shared(table.pages(parent).begin(), table.pages(parent).end());

  const auto copies = extend(table, child, 1);  // position 130 lies in the shared third page
  EXPECT_EQ(copies, (std::vector<PageTable::Copy>{{shared[2], table.pages(child)[2]}}));
  EXPECT_NE(table.pages(child)[2], shared[2]);
  EXPECT_EQ(table.pages(child)[1], shared[1]);
  EXPECT_TRUE(std::equal(shared.begin(), shared.end(), table.pages(parent).begin()));
  EXPECT_TRUE(extend(table, parent, 1).empty()) << "the page is the parent's alone by now";

  const int64_t whole = table.fork(parent, 128);  // full pages only: a new page follows, nothing is copied
  EXPECT_TRUE(extend(table, whole, 1).empty());
  const int64_t inside = table.fork(parent, 100);  // a cut inside a full page: that page is written next
  EXPECT_EQ(extend(table, inside, 1).size(), 1u);
  EXPECT_TRUE(table.pages(table.fork(parent, 0)).empty());
}

TEST(PageTable, ForksThatGrowTogetherCopyOncePerForkBeyondTheLastHolder) {
  PageTable table(4, 64, 128);
  const int64_t a = table.add_request();
  extend(table, a, 10);
  const int64_t b = table.fork(a), c = table.fork(a);
  EXPECT_EQ(table.extend(Ids{a, b, c}, Ids{1, 1, 0}).size(), 2u) << "c still holds the page";
  EXPECT_TRUE(extend(table, c, 1).empty());
  EXPECT_EQ(table.free_pages(), 1);
}

TEST(PageTable, TruncatedIntoASharedPageCopiesIt) {
  PageTable table(4, 64, 256);
  const int64_t a = table.add_request();
  extend(table, a, 128);
  const int64_t b = table.fork(a);
  truncate(table, b, 70);
  EXPECT_EQ(extend(table, b, 1).size(), 1u);
  EXPECT_EQ(table.pages(a)[0], table.pages(b)[0]);
  EXPECT_NE(table.pages(a)[1], table.pages(b)[1]);
}

TEST(PageTable, CopiesAreIndependentAndShareWhatNobodyChanges) {
  PageTable table(6, 64, 256);
  const int64_t a = table.add_request(), b = table.add_request();
  table.extend(Ids{a, b}, Ids{100, 64});
  const State before = state(table);
  const auto change = [&](auto call) {
    PageTable copy = table;
    call(copy);
    EXPECT_NE(state(copy), before);
    EXPECT_EQ(state(table), before);
    return copy;
  };
  const PageTable longer = change([&](PageTable& t) { t.extend(Ids{a, b}, Ids{28, 0}); });
  EXPECT_EQ(longer.pages(a).data(), table.pages(a).data());
  const PageTable grown = change([&](PageTable& t) { t.extend(Ids{a, b}, Ids{29, 0}); });
  EXPECT_NE(grown.pages(a).data(), table.pages(a).data());
  EXPECT_EQ(grown.pages(b).data(), table.pages(b).data());
  change([&](PageTable& t) { truncate(t, a, 1); });
  change([&](PageTable& t) { t.free_request(a); });
  change([&](PageTable& t) { t.add_request(); });
  change([&](PageTable& t) { t.add_request(Ids32{5}, 3); });
  PageTable forked = change([&](PageTable& t) { t.fork(a); });
  const State shared = state(forked);
  PageTable copy = forked;
  EXPECT_EQ(extend(copy, a, 1).size(), 1u);
  EXPECT_EQ(state(forked), shared);
}

TEST(PageTable, RefusesBeforeItChangesAnything) {
  PageTable table(3, 64, 256), other(3, 64, 256);
  const int64_t a = table.add_request(), b = table.add_request(), gone = table.add_request();
  const int64_t foreign = other.add_request();
  table.free_request(gone);
  extend(table, a, 100);

  for (const int64_t id : {gone, foreign, int64_t{0}, int64_t{-1}, int64_t{2147480000}, b + 1000}) {
    const std::string text = "request=" + std::to_string(id) + "; a request of this cache that has not been freed";
    EXPECT_EQ(refused(table, [&] { table.extend(Ids{a, id}, Ids{1, 1}); }), text);
    EXPECT_EQ(refused(table, [&] { table.truncate(Ids{a, id}, Ids{1, 0}); }), text);
    EXPECT_EQ(refused(table, [&] { table.free_request(id); }), text);
    EXPECT_EQ(refused(table, [&] { table.fork(id); }), text);
    EXPECT_EQ(refused(table, [&] { static_cast<void>(table.length(id)); }), text);
  }
  EXPECT_EQ(refused(table, [&] { table.extend(Ids{a, b}, Ids{1, 65}); }), "pages needed=2; free: 1 of 3");
  EXPECT_EQ(refused(table, [&] { extend(table, a, 157); }), "tokens=157; allowed: 0 to 156");
  EXPECT_EQ(refused(table, [&] { extend(table, a, INT64_MAX); }), "tokens=9223372036854775807; allowed: 0 to 156");
  EXPECT_EQ(refused(table, [&] { table.extend(Ids{a, b}, Ids{1, -1}); }), "tokens=-1; allowed: 0 to 256");
  EXPECT_EQ(refused(
                table,
                [&] {
                  table.extend(Ids{a, a}, Ids{1, 1});
                }).find("; each request once") != std::string::npos,
            true);
  EXPECT_EQ(refused(table, [&] { table.extend(Ids{a}, Ids{1, 1}); }), "ids=1; 2, one per value");
  EXPECT_EQ(refused(table, [&] { table.truncate(Ids{b, a}, Ids{0, 101}); }), "length=101; allowed: 0 to 100");
  EXPECT_EQ(refused(table, [&] { table.fork(a, 101); }), "length=101; allowed: 0 to 100");
  EXPECT_EQ(refused(table, [&] { table.fork(a, -2); }), "length=-2; allowed: 0 to 100");
  std::vector<int32_t> out(4, 7), lengths(2, 7);
  EXPECT_EQ(refused(table,
                    [&] {
                      table.write_tables(Ids{b, a}, 1, out.data(), lengths.data());
                    }),
            "block_table width=1; at least 2");
  EXPECT_EQ(out, std::vector<int32_t>(4, 7));
  EXPECT_THROW(PageTable(-1, 64, 64), fold::Error);
  EXPECT_THROW(PageTable(int64_t{1} << 31, 64, 64), fold::Error);
  EXPECT_THROW(PageTable(1, 0, 64), fold::Error);
  EXPECT_THROW(PageTable(1, 64, 0), fold::Error);
}

TEST(PageTable, CopyOnWriteCountsTowardsCapacity) {
  PageTable table(1, 64, 64);
  const int64_t a = table.add_request();
  extend(table, a, 10);
  const int64_t b = table.fork(a);
  EXPECT_EQ(refused(table, [&] { extend(table, b, 1); }), "pages needed=1; free: 0 of 1");
  table.free_request(a);
  EXPECT_TRUE(extend(table, b, 1).empty());
}

TEST(PageTable, RestoredRequestsShareTheirPages) {
  PageTable table(4, 64, 256);
  const int64_t a = table.add_request(std::vector<int32_t>{2, 0}, 100);
  const int64_t b = table.add_request(std::vector<int32_t>{2}, 64);
  EXPECT_EQ(table.free_pages(), 2);
  EXPECT_EQ(extend(table, a, 1).size(), 0u);
  const auto restore = [&](std::vector<int32_t> pages, int64_t length) {
    return refused(table, [&] { table.add_request(pages, length); });
  };
  EXPECT_EQ(restore({3, 3}, 100), "page=3; each page once in a request");
  EXPECT_EQ(restore({4}, 1), "page=4; below 4");
  EXPECT_EQ(restore({-1}, 1), "page=-1; below 4");
  EXPECT_EQ(restore({3}, 65), "pages=1; 2 for this length");
  EXPECT_EQ(restore({3, 2}, 65), "page=2; the same place in every request that holds it");
  EXPECT_EQ(restore({0}, 64), "page=0; the same place in every request that holds it");
  table.free_request(a);
  table.free_request(b);
  EXPECT_EQ(table.free_pages(), 4);
}

/// Two thousand random calls against a model that keeps the keys themselves: every (page, slot) holds the key its
/// requests believe it holds, and no page is lost or held without an owner.
TEST(PageTable, RandomCallsKeepEveryKeyInItsPlace) {
  constexpr int64_t kPages = 60, kPage = 4, kMax = 20;
  PageTable table(kPages, kPage, kMax);
  std::vector<std::array<int, kPage>> memory(kPages);
  std::map<int64_t, std::vector<int>> model;
  std::mt19937 random(1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  int next = 0, exhausted = 0, copied = 0;
  for (int step = 0; step < 2000; ++step) {
    const Ids ids = table.requests();
    const int64_t id = ids.empty() ? 0 : ids[below(static_cast<int64_t>(ids.size()))];
    const int64_t action = ids.empty() ? 0 : below(10);
    if (action == 0) {
      model[table.add_request()];
    } else if (action <= 2) {
      table.free_request(id);
      model.erase(id);
    } else if (action == 3) {
      const int64_t length = below(table.length(id) + 1);
      model[table.fork(id, length)].assign(model[id].begin(), model[id].begin() + length);
    } else if (action == 4) {
      const int64_t length = below(table.length(id) + 1);
      truncate(table, id, length);
      model[id].resize(length);
    } else {
      Ids some, tokens;
      for (const int64_t each : ids) {
        if (below(3) != 0) continue;
        some.push_back(each);
        tokens.push_back(std::min(below(7), kMax - table.length(each)));
      }
      std::vector<PageTable::Copy> copies;
      try {
        copies = table.extend(some, tokens);
      } catch (const fold::Error&) {
        ++exhausted;
        continue;
      }
      for (const auto& copy : copies) memory[copy.destination] = memory[copy.source];
      copied += static_cast<int>(copies.size());
      for (size_t i = 0; i < some.size(); ++i) {
        for (int64_t t = 0; t < tokens[i]; ++t) {
          const auto position = static_cast<int64_t>(model[some[i]].size());
          model[some[i]].push_back(next);
          memory[table.pages(some[i])[position / kPage]][position % kPage] = next++;
        }
      }
    }
    std::vector<bool> held(kPages);
    for (const auto& [each, keys] : model) {
      ASSERT_EQ(table.length(each), static_cast<int64_t>(keys.size()));
      for (size_t i = 0; i < keys.size(); ++i) {
        ASSERT_EQ(memory[table.pages(each)[i / kPage]][i % kPage], keys[i]) << "step " << step << " key " << i;
      }
      for (const int32_t page : table.pages(each)) held[page] = true;
    }
    ASSERT_EQ(table.free_pages(), kPages - std::count(held.begin(), held.end(), true)) << "step " << step;
  }
  EXPECT_GT(exhausted, 10);
  EXPECT_GT(copied, 50);
}

}  // namespace
