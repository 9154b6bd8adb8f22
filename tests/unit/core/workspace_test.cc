#include "core/workspace.h"

#include <gtest/gtest.h>

#include "core/plan.h"

namespace kda {
namespace {

TEST(Workspace, R30_SectionsAreAlignedAndApart) {
  WorkspaceBook book;
  const auto a = book.book("scratch", KDA_FP32, {3});
  const auto b = book.book("segments", KDA_BF16, {1, 5});
  EXPECT_EQ(book.total_bytes(), 512);
  alignas(256) char memory[512];
  const WorkspaceGrant grant(book, memory);
  EXPECT_EQ(grant.get<char>(a), memory);
  EXPECT_EQ(grant.get<char>(b), memory + 256);
}

TEST(Workspace, R30_OverflowIsRemembered) {
  WorkspaceBook book;
  book.book("scratch", KDA_FP32, {INT64_MAX / 2, 3});
  EXPECT_TRUE(book.overflowed());
}

TEST(Workspace, Z08_OneByteShortIsRefusedWithBothSizes) {
  kda_plan plan;
  plan.op = KDA_OP_PREFILL;
  plan.book.book_bytes("scratch", 1000);
  alignas(256) static char memory[2048];
  EXPECT_TRUE(check_workspace(plan, {memory, 1024}).ok());
  const Status s = check_workspace(plan, {memory, 1023});
  EXPECT_EQ(s.code(), KDA_WORKSPACE_TOO_SMALL);
  EXPECT_NE(s.message().find("1024"), std::string::npos);
  EXPECT_NE(s.message().find("1023"), std::string::npos);
  EXPECT_EQ(check_workspace(plan, {memory + 16, 1024}).code(), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(check_workspace(plan, {nullptr, 4096}).code(), KDA_WORKSPACE_TOO_SMALL);
}

TEST(Workspace, StructSizeRule) {
  struct New {
    size_t struct_size;
    int64_t known;
    int64_t later;
  } in{sizeof(New), 7, 0};
  struct Old {
    size_t struct_size;
    int64_t known;
  } out{};
  EXPECT_TRUE(read_struct(&in, sizeof(New), &out, sizeof(Old), "desc").ok());
  EXPECT_EQ(out.known, 7);
  in.later = 1;  // a field that this library does not know
  EXPECT_EQ(read_struct(&in, sizeof(New), &out, sizeof(Old), "desc").code(), KDA_INVALID_ARGUMENT);
  in.struct_size = 0;
  EXPECT_EQ(read_struct(&in, 0, &out, sizeof(Old), "desc").code(), KDA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kda
