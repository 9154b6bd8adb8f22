// Trace readers: every format, and every way in which a line can be bad with the message it gives.
#include "serve/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "serve/trace_line.h"

namespace kda::serve {
namespace {

Result<Trace> read(const std::string& text, TraceOptions options = {}) {
  std::istringstream in(text);
  return read_trace(in, "t", options);
}

std::string line(const std::string& input, const std::string& output = "5", const std::string& timestamp = "0",
                 const std::string& hashes = "[1]") {
  return R"({"timestamp": )" + timestamp + R"(, "input_length": )" + input + R"(, "output_length": )" + output +
         R"(, "hash_ids": )" + hashes + "}\n";
}

void expect_error(const std::string& text, const std::string& message, TraceOptions options = {}) {
  auto trace = read(text, options);
  ASSERT_FALSE(trace.ok()) << text;
  EXPECT_EQ(trace.status().code(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(trace.status().message().find(message), std::string::npos)
      << "wanted: " << message << "\ngot:    " << trace.status().message();
}

TEST(Trace, MooncakeLines) {
  auto trace = read(line("513", "7", "10", "[3, 9223372036854775807]") + "\n" + line("512", "0", "2.5"));
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  EXPECT_EQ(trace.value().format, "mooncake");
  ASSERT_EQ(trace.value().requests.size(), 2u);
  const TraceRequest& first = trace.value().requests[0];  // sorted by arrival
  EXPECT_EQ(first.index, 1);
  EXPECT_EQ(first.arrival_ns, 0);
  EXPECT_EQ(first.output_length, 0);
  const TraceRequest& second = trace.value().requests[1];
  EXPECT_EQ(second.index, 0);
  EXPECT_EQ(second.arrival_ns, 7500000);
  EXPECT_EQ(second.input_length, 513);
  EXPECT_EQ(trace.value().blocks_of(second)[1], 9223372036854775807u);
}

TEST(Trace, ByteOrderMarkCarriageReturnsBlankAndUnterminatedLines) {
  std::string last = line("2");
  last.pop_back();
  auto trace = read("\xEF\xBB\xBF" + line("1") + "\r\n  \n" + last + "\r");
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  EXPECT_EQ(trace.value().requests.size(), 2u);
}

TEST(Trace, UnknownFieldsAreIgnoredWhateverTheyHold) {
  auto trace =
      read(R"({"chat_id":-7,"x":{"input_length":"no","y":[1,{"z":null}]},"f":1e40,"timestamp":0,"input_length":3,)"
           R"("output_length":1,"hash_ids":[0],"tail":[[],[true]]})");
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  EXPECT_EQ(trace.value().requests[0].input_length, 3);
}

TEST(Trace, TimestampsAreSortedStably) {
  auto trace = read(line("1", "1", "5") + line("2", "1", "3") + line("3", "1", "5") + line("4", "1", "3"));
  ASSERT_TRUE(trace.ok());
  std::vector<int64_t> order;
  for (const TraceRequest& r : trace.value().requests) order.push_back(r.index);
  EXPECT_EQ(order, (std::vector<int64_t>{1, 3, 0, 2}));
}

TEST(Trace, BadLengthsNameFileLineFieldAndValue) {
  const std::string good = line("4");
  expect_error(good + line("0"), "t:2: input_length: wanted an integer in 1..2147483647, got 0");
  expect_error(line("-3"), "t:1: input_length: wanted an integer in 1..2147483647, got -3");
  expect_error(line("1e30"), "input_length: wanted an integer in 1..2147483647, got 1e30");
  expect_error(line("7.5"), "input_length: wanted an integer in 1..2147483647, got 7.5");
  expect_error(line("2147483648"), "got 2147483648");
  expect_error(line("9223372036854775808"), "got 9223372036854775808");
  expect_error(line("99999999999999999999999"), "got 99999999999999999999999");
  expect_error(line("NaN"), "t:1: input_length: wanted valid JSON, got \"NaN\" at column 34");
  expect_error(line("Infinity"), "input_length: wanted valid JSON, got \"Infinity\"");
  expect_error(line("\"12\""), "input_length: wanted an integer in 1..2147483647, got \"12\"");
  expect_error(line("null"), "got null");
  expect_error(line("true"), "got true");
  expect_error(line("[1]"), "got an array");
  expect_error(line("{}"), "got an object");
  expect_error(line("4", "-1"), "output_length: wanted an integer in 0..2147483647, got -1");
  expect_error(line("4", "5", "-1"), "timestamp: wanted milliseconds in [0, 9e12], got -1");
  expect_error(line("4", "5", "1e30"), "timestamp: wanted milliseconds in [0, 9e12], got 1e30");
  expect_error(line("4", "5", "1e400"), "timestamp: wanted milliseconds in [0, 9e12], got 1e400");
}

TEST(Trace, BadHashes) {
  expect_error(line("513"), "hash_ids: wanted 2 entries (one per 512 tokens of input_length 513), got 1");
  expect_error(line("512", "1", "0", "[1,2]"), "hash_ids: wanted 1 entries");
  expect_error(line("1", "1", "0", "[-1]"), "hash_ids: wanted integers in 0..2^63-1, got -1");
  expect_error(line("1", "1", "0", "[9223372036854775808]"), "hash_ids: wanted integers in 0..2^63-1");
  expect_error(line("1", "1", "0", "[1.5]"), "hash_ids: wanted integers in 0..2^63-1, got 1.5");
  expect_error(line("1", "1", "0", "[[1]]"), "hash_ids: wanted integers in 0..2^63-1, got an array");
  expect_error(line("1", "1", "0", "7"), "hash_ids: wanted an array of integers, got 7");
}

TEST(Trace, BadShapes) {
  expect_error(R"({"timestamp":0,"output_length":1,"hash_ids":[]})", "input_length: wanted a value, got none");
  expect_error(R"({"timestamp":0,"input_length":1,"input_length":2,"output_length":1,"hash_ids":[1]})",
               "input_length: wanted one value, got the field twice");
  expect_error(line("4") + "[1,2]\n", "t:2: line: wanted a JSON object, got an array");
  expect_error(line("4") + "17\n", "t:2: line: wanted a JSON object, got 17");
  expect_error(line("4") + R"({"timestamp": 0, "input_len)",
               "t:2: wanted a complete JSON object, got a line that ends at column 28");
  expect_error(line("4") + R"({"timestamp": 0, "input_length": 5)",
               "t:2: wanted a complete JSON object, got a line that ends at column 35");
  expect_error(line("4") + line("5") + "{} {}\n", "t:3: ");
  expect_error(line("4") + std::string("\x00\xff\x01PNG", 6) + "\n", R"(t:2: wanted valid JSON, got "\x00)");
}

TEST(Trace, WhatIsNoTraceAtAll) {
  expect_error("", "t: wanted at least one request, got none");
  expect_error("\n\n", "t: wanted at least one request, got none");
  expect_error("hello\n", "t:1: line: wanted a Mooncake JSON object or the header of an Azure or BurstGPT CSV");
  expect_error(std::string("\x7f"
                           "ELF\x02\x01\x00\x00",
                           8),
               R"(got "\x7fELF\x02\x01\x00\x00")");
  expect_error(line("4"), "format: wanted auto, mooncake, azure or burstgpt, got \"json\"", {.format = "json"});
  expect_error(line("4"), "header: wanted the columns TIMESTAMP, ContextTokens and GeneratedTokens",
               {.format = "azure"});
}

TEST(Trace, SkipBadCountsAndKeepsTheFirstReason) {
  auto trace = read(line("4") + line("x") + line("5") + line("0"), {.skip_bad = true});
  ASSERT_TRUE(trace.ok());
  EXPECT_EQ(trace.value().requests.size(), 2u);
  EXPECT_EQ(trace.value().requests[1].index, 1);
  EXPECT_EQ(trace.value().skipped, 2);
  EXPECT_NE(trace.value().first_skipped.find("t:2: input_length"), std::string::npos);
  expect_error(line("0"), "got none; first bad line: t:1: input_length", {.skip_bad = true});
}

TEST(Trace, LimitStopsReading) {
  auto trace = read(line("4") + line("5") + "garbage\n", {.limit = 2});
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  EXPECT_EQ(trace.value().requests.size(), 2u);
}

TEST(Trace, AzureCsv) {
  auto trace = read(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-11-16 18:15:46.6805900,374,44\r\n"
      "2023-11-16 18:15:50,396,0\r\n");
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  EXPECT_EQ(trace.value().format, "azure");
  ASSERT_EQ(trace.value().requests.size(), 2u);
  EXPECT_EQ(trace.value().requests[0].input_length, 374);
  EXPECT_EQ(trace.value().requests[1].arrival_ns, 3319410000);
  EXPECT_EQ(trace.value().requests[0].num_blocks, 0);
  const std::string header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  expect_error(header + "2023-11-31 00:00:00,1,1\n", "t:2: TIMESTAMP: wanted a time such as");
  expect_error(header + "2023-11-30 00:00:00,1.0,1\n",
               "t:2: ContextTokens: wanted an integer in 1..2147483647, got \"1.0\"");
  expect_error(header + "2023-11-30 00:00:00,1,NaN\n", "GeneratedTokens: wanted an integer in 0..2147483647");
  expect_error(header + "2023-11-30 00:00:00,1\n", "t:2: line: wanted 3 fields as in the header, got 2");
  expect_error(header, "wanted at least one request, got none");
}

TEST(Trace, BurstGptCsv) {
  auto trace = read(
      "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
      "5,ChatGPT,472,18,490,Conversation log\n"
      "45.25,\"GPT,4\",1087,230,1317,Conversation log\n");
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  EXPECT_EQ(trace.value().format, "burstgpt");
  EXPECT_EQ(trace.value().requests[1].output_length, 230);
  EXPECT_EQ(trace.value().requests[1].arrival_ns, 40250000000);
  const std::string header = "Timestamp,Request tokens,Response tokens\n";
  expect_error(header + "-1,4,4\n", "Timestamp: wanted seconds in [0, 9e9], got \"-1\"");
  expect_error(header + "nan,4,4\n", "Timestamp: wanted seconds in [0, 9e9], got \"nan\"");
  expect_error(header + "1,0,4\n", "Request tokens: wanted an integer in 1..2147483647, got \"0\"");
  expect_error(header + "1,\"4,4\n", "t:2: line: wanted a closing quote");
}

TEST(Trace, CalendarTimes) {
  EXPECT_EQ(parse_calendar_time("1970-01-01 00:00:00").value(), 0);
  EXPECT_EQ(parse_calendar_time("1970-01-02T00:00:01.5Z").value(), 86401500000000);
  EXPECT_EQ(parse_calendar_time("1970-01-01 01:30:00+01:30").value(), 0);
  EXPECT_EQ(parse_calendar_time("2000-02-29 00:00:00.000000001").value(), 951782400000000001);
  for (const char* bad : {"2001-02-29 00:00:00", "2000-01-01", "2000-01-01 24:00:00", "2000-01-01 00:00:00.",
                          "2000-01-01 00:00:00+1", "2000-01-01 00:00:60", "20000101 000000", ""}) {
    EXPECT_FALSE(parse_calendar_time(bad).ok()) << bad;
  }
}

TEST(Trace, MinusZeroIsZero) {
  auto trace = read(line("4", "-0", "-0", "[-0]"));
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  EXPECT_EQ(trace.value().requests[0].output_length, 0);
  expect_error(line("-0"), "input_length: wanted an integer in 1..2147483647, got 0");
}

// Whatever stands in the file, a message is one short printable line.
TEST(Trace, MessagesShowLongAndUnprintableTextCut) {
  const std::string digits(1000000, '7');
  const std::string odd = "\\u001b[31m" + std::string(1000000, 'k');
  const std::string header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  for (const std::string& text :
       {line(digits), line(digits + ".5"), line("4", "5", "-" + digits), line("4", "5", "0", "[1" + digits + "]"),
        line("\"" + odd + "\""), "{\"" + odd + "\": 1e400}\n", "{\"" + odd + "\": x" + digits + "}\n", digits + "\n",
        header + digits + ",1,1\n", header + "2023-11-30 00:00:00," + digits + ",1\n", header + "1," + digits + "\n",
        "TIMESTAMP," + digits + "\n"}) {
    auto trace = read(text);
    ASSERT_FALSE(trace.ok()) << text.substr(0, 80);
    const std::string& message = trace.status().message();
    EXPECT_LT(message.size(), 500u) << message.substr(0, 200);
    EXPECT_TRUE(std::all_of(message.begin(), message.end(), [](char c) { return c >= ' ' && c <= '~'; })) << message;
  }
}

TEST(Trace, AColumnNamedTwiceIsNotGuessed) {
  expect_error("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n2023-11-30 00:00:00,1,2,3\n",
               "header: wanted the columns TIMESTAMP, ContextTokens and GeneratedTokens, each once",
               {.format = "azure"});
}

TEST(Trace, FilesThatAreNone) {
  auto missing = read_trace("/nonexistent/trace.jsonl", {});
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.status().message().find("/nonexistent/trace.jsonl: wanted a readable file"), std::string::npos);
  auto directory = read_trace(std::filesystem::temp_directory_path().string(), {});
  ASSERT_FALSE(directory.ok());
  EXPECT_NE(directory.status().message().find("got a directory"), std::string::npos);
}

TEST(Trace, ALineThatNeverEnds) {
  const std::string endless((size_t{64} << 20) + 70000, ' ');
  expect_error(endless, "t:1: line: wanted at most 67108864 bytes");
  expect_error(line("4") + endless + "\n", "t:2: line: wanted at most 67108864 bytes");
  auto trace = read(line("4") + endless + "\n" + line("5") + endless, {.skip_bad = true});
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  EXPECT_EQ(trace.value().requests.size(), 2u);
  EXPECT_EQ(trace.value().skipped, 2);
}

}  // namespace
}  // namespace kda::serve
