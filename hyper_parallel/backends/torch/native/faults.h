// Named faults, for tests. `HYPER_PARALLEL_NATIVE_FAULT=a,b` switches off the conditions `a` and `b` of the tape, in a build with
// -DHYPER_PARALLEL_FAULTS. A test then shows that each condition is needed. The normal build contains none of it: HP_FAULT is
// the constant false there.
#pragma once

#ifdef HYPER_PARALLEL_FAULTS

#include <cstdlib>
#include <string_view>

namespace hyper_parallel {

// Read at every question: a test switches faults on and off while the process runs.
inline bool is_fault_on(std::string_view name) {
  const char* named = std::getenv("HYPER_PARALLEL_NATIVE_FAULT");
  std::string_view left = named == nullptr ? "" : named;
  while (!left.empty()) {
    const auto comma = left.find(',');
    if (left.substr(0, comma) == name) return true;
    left = comma == std::string_view::npos ? std::string_view() : left.substr(comma + 1);
  }
  return false;
}

}  // namespace hyper_parallel

#define HP_FAULT(name) ::hyper_parallel::is_fault_on(name)

#else

#define HP_FAULT(name) false

#endif
