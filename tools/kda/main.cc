// kda: the program. Finds the verb, parses its options, runs it.
#include <cstdio>
#include <exception>
#include <kda/kda.hpp>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "verb.h"

namespace {

using kda::tools::AddVerb;

constexpr AddVerb kVerbs[] = {
    kda::tools::add_info,
    kda::tools::add_check,
    kda::tools::add_bench,
    kda::tools::add_replay,
};

int run(int argc, char** argv) {
  CLI::App app("Kimi Delta Attention: replay traffic, run and check operators", "kda");
  app.set_version_flag("--version", std::string("kda ") + kda_version_string() + " (" + kda_source_hash() + ")");
  app.require_subcommand(1);
  std::vector<std::pair<CLI::App*, std::function<int()>>> verbs;
  std::string names;
  for (AddVerb add : kVerbs) {
    auto body = add(app);
    verbs.emplace_back(app.get_subcommands([](CLI::App*) { return true; }).back(), std::move(body));
    names += " " + verbs.back().first->get_name();
  }
  // CLI11 would only say that a verb is missing.
  const auto is_verb = [&](const std::string& name) {
    for (const auto& [verb, body] : verbs) {
      if (verb->get_name() == name) return true;
    }
    return false;
  };
  const std::string first = argc > 1 ? argv[1] : "";
  if (!first.empty() && first[0] != '-' && !is_verb(first)) {
    std::fprintf(stderr, "kda: wanted one of the verbs%s, got \"%s\"\n", names.c_str(), first.c_str());
    return kda::tools::kUsage;
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

// What the library refuses because of what it was asked is bad usage; anything else a failed job.
int exit_code(kda_status status) {
  const bool asked = status == KDA_INVALID_ARGUMENT || status == KDA_NOT_FOUND || status == KDA_UNSUPPORTED;
  return asked ? kda::tools::kUsage : kda::tools::kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const kda::tools::UsageError& e) {
    std::fprintf(stderr, "kda: %s\n", e.what());
    return kda::tools::kUsage;
  } catch (const kda::Error& e) {
    std::fprintf(stderr, "kda: %s\n", e.what());
    return exit_code(e.status());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "kda: out of memory\n");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "kda: %s\n", e.what());
  }
  return kda::tools::kFailed;
}
