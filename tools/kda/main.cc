// kda: the program. Finds the verb, parses its options, runs it.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <kda/kda.hpp>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "values.h"
#include "verb.h"

namespace {

using kda::tools::AddVerb;

constexpr AddVerb kVerbs[] = {
    kda::tools::add_info, kda::tools::add_check, kda::tools::add_bench, kda::tools::add_replay, kda::tools::add_run,
};

// CLI11's messages, but for values that its conversion refuses: numbers beyond the option's type, flags with one.
std::string message_of(const CLI::ParseError& e) {
  const std::string start = "Could not convert: ", text = e.what();
  const size_t equals = text.find(" = ");
  if (text.rfind(start, 0) != 0 || equals == std::string::npos) return text;
  return text.substr(start.size(), equals - start.size()) + ": wanted a value in its range, got \"" +
         text.substr(equals + 3) + "\"";
}

int run(int argc, char** argv) {
  CLI::App app("Kimi Delta Attention: replay traffic, run and check operators", "kda");
  app.set_version_flag("--version", std::string("kda ") + kda_version_string() + " (" + kda_source_hash() + ")");
  app.require_subcommand(1);
  std::vector<std::pair<CLI::App*, std::function<int()>>> verbs;
  std::string names;
  for (AddVerb add : kVerbs) {
    auto body = add(app);
    verbs.emplace_back(app.get_subcommands([](CLI::App*) { return true; }).back(), std::move(body));
    kda::tools::check_numbers(*verbs.back().first);
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
    if (e.get_exit_code() == 0) return app.exit(e);  // help and version
    const std::string name = is_verb(first) ? "kda " + first : "kda";
    std::fprintf(stderr, "%s: %s; %s --help lists what there is\n", name.c_str(), message_of(e).c_str(),
                 name.c_str());
    return kda::tools::kUsage;
  }
  for (auto& [verb, body] : verbs) {
    if (!verb->parsed()) continue;
    const int code = body();
    // A full disk or a closed pipe shows here at the latest; what was printed is then not all there.
    errno = 0;
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    throw kda::tools::UsageError(std::string("standard output: could not be written") +
                                 (errno != 0 ? std::string(": ") + std::strerror(errno) : ""));
  }
  return kda::tools::kUsage;
}

// What the library refuses because of what it was asked is bad usage; anything else a failed job.
int exit_code(kda_status status) {
  const bool asked = status == KDA_INVALID_ARGUMENT || status == KDA_NOT_FOUND || status == KDA_UNSUPPORTED;
  return asked ? kda::tools::kUsage : kda::tools::kFailed;
}

constexpr const char* kNoMemory = "kda: out of memory\n";

// Values of the JSON library allocate in their destructors, where an exception may not leave.
[[noreturn]] void on_terminate() {
  try {
    if (const auto e = std::current_exception()) std::rethrow_exception(e);
  } catch (const std::bad_alloc&) {
    std::fputs(kNoMemory, stderr);
    std::_Exit(kda::tools::kFailed);
  } catch (...) {
  }
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  std::set_terminate(on_terminate);
  try {
    return run(argc, argv);
  } catch (const kda::tools::UsageError& e) {
    std::fprintf(stderr, "kda: %s\n", e.what());
    return kda::tools::kUsage;
  } catch (const kda::Error& e) {
    std::fprintf(stderr, "kda: %s\n", e.what());
    return exit_code(e.status());
  } catch (const std::bad_alloc&) {
    std::fputs(kNoMemory, stderr);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "kda: %s\n", e.what());
  }
  return kda::tools::kFailed;
}
