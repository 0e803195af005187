// Which nodes a running backward can still reach, by number.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

namespace hyper_parallel {

// Gradient accumulators carry the largest number there is: they are never ordered by it.
constexpr uint64_t kNeverOrdered = uint64_t{1} << 63;

// The numbers of all nodes that the running node leads to, itself included; empty outside a backward.
inline std::vector<uint64_t> reachable_numbers() {
  std::vector<uint64_t> numbers;
  const auto start = torch::autograd::get_current_node();
  if (start == nullptr) return numbers;
  std::unordered_set<const torch::autograd::Node*> seen{start.get()};
  std::vector<const torch::autograd::Node*> open{start.get()};
  while (!open.empty()) {
    const auto* node = open.back();
    open.pop_back();
    if (node->sequence_nr() < kNeverOrdered) numbers.push_back(node->sequence_nr());
    for (const auto& edge : node->next_edges()) {
      if (edge.function != nullptr && seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
    }
  }
  return numbers;
}

}  // namespace hyper_parallel
