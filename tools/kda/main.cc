// kda: the program. Finds the verb, parses its options, runs it.
#include <kda/kda.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "verb.h"

namespace {

using kda::tools::AddVerb;

constexpr AddVerb kVerbs[] = {
    kda::tools::add_replay,
};

int run(int argc, char** argv) {
  CLI::App app("Kimi Delta Attention: replay traffic, run and check operators", "kda");
  app.set_version_flag("--version", std::string("kda ") + kda_version_string() + " (" + kda_source_hash() + ")");
  app.require_subcommand(1);
  std::vector<std::pair<CLI::App*, std::function<int()>>> verbs;
  for (AddVerb add : kVerbs) {
    auto body = add(app);
    verbs.emplace_back(app.get_subcommands([](CLI::App*) { return true; }).back(), std::move(body));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    // Help and version are successes; everything else is bad usage.
    return app.exit(e) == 0 ? kda::tools::kDone : kda::tools::kUsage;
  }
  for (auto& [verb, body] : verbs) {
    if (verb->parsed()) return body();
  }
  return kda::tools::kUsage;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "kda: out of memory\n");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "kda: %s\n", e.what());
  }
  return kda::tools::kFailed;
}
