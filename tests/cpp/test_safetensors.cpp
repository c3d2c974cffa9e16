#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "fold/safetensors.h"

namespace {

using fold::DType;
using fold::TensorFile;
using fold::TensorFileWriter;

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(directory_); }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string path(const std::string& name = "file.safetensors") const { return (directory_ / name).string(); }

  /// Writes header length, header and `data` zero bytes; a length of -1 is the true one.
  std::string raw(const std::string& header, int64_t data, int64_t length = -1) const {
    const uint64_t n = length < 0 ? header.size() : static_cast<uint64_t>(length);
    std::ofstream out(path(), std::ios::binary);
    out.write(reinterpret_cast<const char*>(&n), 8);
    out << header << std::string(static_cast<size_t>(data), '\0');
    return path();
  }

  std::string refusal(const std::string& header, int64_t data, int64_t length = -1) const {
    try {
      TensorFile file(raw(header, data, length));
    } catch (const fold::Error& e) {
      return std::string(e.what()).substr(path().size());
    }
    return "accepted";
  }

  std::filesystem::path directory_ =
      std::filesystem::temp_directory_path() /
      ("fold_safetensors_" + std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
};

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

TEST_F(Safetensors, WhatIsWrittenIsRead) {
  const std::vector<float> a{1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> b{-7};
  const fold::TensorMetadata metadata{{"quote\"\\", "line\nbreak \xC3\xA9"}, {"empty", ""}};
  TensorFileWriter writer(path(), {{"a", DType::f32, {2, 3}}, {"b", DType::i64, {}}, {"none", DType::u8, {0, 9}}},
                          metadata);
  writer.append(a.data(), 10);
  writer.append(reinterpret_cast<const char*>(a.data()) + 10, 14);
  EXPECT_THROW(writer.commit(), fold::Error) << "b is missing";
  writer.append(b.data(), 8);
  EXPECT_FALSE(std::filesystem::exists(path()));
  writer.commit();

  TensorFile file(path());
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(file.read<float>(file.entry("a", DType::f32, 2)), a);
  EXPECT_EQ(file.read<int64_t>(file.entry("b", DType::i64, 0)), b);
  EXPECT_TRUE(file.read<uint8_t>(file.entry("none")).empty());
  float last = 0;
  file.read(file.entry("a"), 20, 4, &last);
  EXPECT_EQ(last, 6);
  EXPECT_THROW(file.read(file.entry("a"), 20, 5, &last), fold::Error);
  EXPECT_THROW(file.read(file.entry("a"), -1, 1, &last), fold::Error);
  EXPECT_THROW(file.read(file.entry("a"), 25, 0, &last), fold::Error);
  EXPECT_THROW(file.entry("c"), fold::Error);
  EXPECT_THROW(file.entry("a", DType::f32, 1), fold::Error);
  EXPECT_THROW(file.entry("a", DType::i32, 2), fold::Error);
}

TEST_F(Safetensors, AnUnfinishedWriteLeavesTheOldFile) {
  raw("{}", 0);
  {
    TensorFileWriter writer(path(), {{"a", DType::f32, {2}}}, {});
    writer.append("abcd", 4);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), {}), 1);
  EXPECT_TRUE(TensorFile{path()}.metadata().empty());
  EXPECT_THROW(TensorFileWriter(path("no/such/place"), {}, {}), fold::Error);
}

TEST_F(Safetensors, JsonIsReadStrictly) {
  TensorFile file(raw(" {\t\"__metadata__\" : {\"\\u00e9\\ud83d\\ude00\\n\":\"\\\"\\/\"},\n" +
                          tensor("x", "BOOL", "[ 2 , 1 ]", "[0,2]") + "}  ",
                      2));
  EXPECT_EQ(file.metadata().at("\xC3\xA9\xF0\x9F\x98\x80\n"), "\"/");
  EXPECT_EQ(file.entry("x").shape, (std::vector<int64_t>{2, 1}));

  const std::string good = tensor("x", "U8", "[2]", "[0,2]");
  for (const std::string& bad : std::initializer_list<std::string>{
           "",
           "[]",
           "{" + good,
           "{" + good + ",}",
           "{" + good + "}x",
           "{" + good + "}{}",
           "{\"x\":1}",
           "{\"x\":{}}",
           "{\"x\":{\"dtype\":\"U8\",\"shape\":[2]}}",
           "{" + tensor("x", "U8", "[2]", "[0,2,4]") + "}",
           "{" + tensor("x", "U8", "[2.0]", "[0,2]") + "}",
           "{" + tensor("x", "U8", "[-2]", "[0,2]") + "}",
           "{" + tensor("x", "U8", "[02]", "[0,2]") + "}",
           "{" + tensor("x", "U8", "[2,]", "[0,2]") + "}",
           "{" + tensor("x", "U8", "[18446744073709551618]", "[0,2]") + "}",
           "{\"__metadata__\":{\"a\":1}}",
           "{\"__metadata__\":{\"a\\q\":\"\"}}",
           "{\"__metadata__\":{\"\\ud800\":\"\"}}",
           "{\"__metadata__\":{\"\\u12\":\"\"}}",
           "{\"__metadata__\":{\"\\ud800\\u0041\":\"\"}}",
           "{\"__metadata__\":{\"a\nb\":\"\"}}",
           "{\"x\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2],\"more\":[0]}}"}) {
    EXPECT_NE(refusal(bad, 2).find("a safetensors file has"), std::string::npos) << bad << refusal(bad, 2);
  }
  EXPECT_EQ(refusal("{" + good + "," + good + "}", 2), "=\"x\" twice; each name once");
  EXPECT_EQ(refusal("{" + tensor("x", "F8_E4M3", "[2]", "[0,2]") + "}", 2),
            ": dtype=F8_E4M3; supported: F32 BF16 F16 I32 I64 U8 I8 U64 BOOL");
}

TEST_F(Safetensors, EveryBoundIsChecked) {
  const auto one = [&](const char* dtype, const char* shape, const char* offsets, int64_t data) {
    return refusal("{" + tensor("x", dtype, shape, offsets) + "}", data);
  };
  EXPECT_EQ(one("U8", "[2]", "[0,2]", 2), "accepted");
  EXPECT_EQ(one("U8", "[2]", "[0,2]", 1), ": data_offsets of x=[0, 2]; the file has 1");
  EXPECT_EQ(one("U8", "[2]", "[0,2]", 3), ": bytes of data=3; its tensors have 2");
  EXPECT_EQ(one("U8", "[2]", "[1,3]", 3), ": data_offsets of x=[1, 3]; tensors lie end to end, so it begins at 0");
  EXPECT_EQ(one("U8", "[2]", "[0,9223372036854775807]", 2),
            ": data_offsets of x=[0, 9223372036854775807]; the file has 2");
  EXPECT_EQ(one("F32", "[2]", "[0,2]", 2), ": data_offsets of x=[0, 2]; the bytes of its shape and dtype");
  EXPECT_EQ(one("U8", "[4294967296,4294967296]", "[0,0]", 0),
            ": data_offsets of x=[0, 0]; the bytes of its shape and dtype");
  EXPECT_EQ(refusal("{" + tensor("x", "U8", "[2]", "[0,2]") + "," + tensor("y", "U8", "[2]", "[1,3]") + "}", 3),
            ": data_offsets of y=[1, 3]; tensors lie end to end, so it begins at 2");
  EXPECT_EQ(refusal("{" + tensor("y", "U8", "[2]", "[2,4]") + "," + tensor("x", "U8", "[2]", "[0,2]") + "}", 4),
            "accepted");
  EXPECT_EQ(refusal("{}", 0, 3), ": header length=3; at most 2");
  EXPECT_EQ(refusal("{}", 0, INT64_MAX), ": header length=9223372036854775807; at most 2");
  EXPECT_THROW(TensorFile{path("missing")}, fold::Error);
  EXPECT_THROW(TensorFile(directory_.string()), fold::Error);
  std::ofstream(path("short")) << "1234567";
  EXPECT_THROW(TensorFile{path("short")}, fold::Error);
}

/// A small file cut at every length and with every byte of its header flipped: an error or a file whose tensors fit.
TEST_F(Safetensors, NoDamageReadsOutsideTheFile) {
  const std::string header =
      "{" + tensor("x", "F32", "[2,2]", "[0,16]") + "," + tensor("y", "U8", "[3]", "[16,19]") + "}";
  raw(header, 19);
  std::ifstream in(path(), std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  const auto write = [&](const std::string& bytes) { std::ofstream(path(), std::ios::binary) << bytes; };
  for (size_t n = 0; n < whole.size(); ++n) {
    write(whole.substr(0, n));
    EXPECT_THROW(TensorFile{path()}, fold::Error) << "cut at " << n;
  }
  int refused = 0;
  for (size_t i = 0; i < whole.size() - 19; ++i) {
    for (const int bit : {0, 3, 6, 7}) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ 1 << bit);
      write(damaged);
      try {
        TensorFile file(path());
        for (const char* name : {"x", "y"}) {
          if (file.contains(name)) file.read<uint8_t>(file.entry(name));
        }
      } catch (const fold::Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 300);
}

}  // namespace
