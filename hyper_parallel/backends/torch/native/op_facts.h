// What an op is, as far as recording it goes. Decided once per op, from its schema, and remembered.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "faults.h"

namespace hyper_parallel {

enum class OpKind : uint8_t {
  kUnrecorded,  // makes views or answers a question: nothing to remake
  kReplayable,  // may run again
  kKept,        // is never run again: its outputs are kept
  kRefused,     // ends the recording; the reason says why
};

struct OpFacts {
  OpKind kind = OpKind::kReplayable;
  bool is_random = false;         // draws from a generator
  bool leaves_bytes_unset = false;  // an `empty` op: a kernel that the dispatcher does not see may fill its output
  bool is_steering = false;       // indices, orders, choices: small outputs are kept
  bool overwrites = false;        // what it writes does not depend on what was there
  c10::SmallVector<uint8_t, 4> writes;  // positions of the arguments that it changes
  int training_flag = -1;  // position of the flag that says whether `hidden_writes` happen
  c10::SmallVector<uint8_t, 2> hidden_writes;  // changed although the schema does not say so
  const char* reason = nullptr;   // of kRefused
  size_t argument_count = 0;
  size_t result_count = 0;
  size_t hash = 0;
};

inline bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  for (auto known : names) {
    if (name == known) return true;
  }
  return false;
}

inline OpFacts examine(const c10::OperatorHandle& op) {
  OpFacts facts;
  facts.hash = std::hash<c10::OperatorName>{}(op.operator_name());
  if (!op.hasSchema()) {
    facts.kind = OpKind::kRefused;
    facts.reason = "an op without a schema";
    return facts;
  }
  const auto& schema = op.schema();
  const std::string& full_name = op.operator_name().name;
  const auto colons = full_name.find("::");
  const std::string space = full_name.substr(0, colons);
  const std::string_view name = std::string_view(full_name).substr(colons + 2);

  const auto& arguments = schema.arguments();
  facts.argument_count = arguments.size();
  facts.result_count = schema.returns().size();
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = arguments[at].alias_info();
    if (alias != nullptr && alias->isWrite()) facts.writes.push_back(static_cast<uint8_t>(at));
    if (arguments[at].name() == "training" || arguments[at].name() == "train") facts.training_flag = static_cast<int>(at);
  }
  facts.is_random = op.hasTag(at::Tag::nondeterministic_seeded);

  if (space == "aten" || space == "prim" || space == "prims") {
    if (name == "record_stream" || space == "prim") {
      facts.kind = OpKind::kUnrecorded;
      return facts;
    }
    if (is_one_of(name, {"set_", "resize_", "resize_as_", "_resize_output_", "resize_as_sparse_", "set_data", "swap_"})) {
      facts.kind = OpKind::kRefused;
      facts.reason = "an op that gives a tensor another storage";
      return facts;
    }
    if (is_one_of(name, {"_cudnn_rnn", "miopen_rnn", "_cudnn_init_dropout_state"})) facts.kind = OpKind::kKept;
    if (is_one_of(name, {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
                         "_batch_norm_impl_index", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"})) {
      for (size_t at = 0; at < arguments.size(); ++at) {
        if (!HP_FAULT("hidden_writes") && (arguments[at].name() == "running_mean" || arguments[at].name() == "running_var")) {
          facts.hidden_writes.push_back(static_cast<uint8_t>(at));
        }
      }
    }
  } else if (space == "c10d") {
    facts.kind = OpKind::kRefused;
    facts.reason = "a collective that writes its arguments";
    return facts;
  } else {
    if (!HP_FAULT("other_libraries")) facts.kind = OpKind::kKept;  // it is not known what an op of another library does beside its outputs
    if (!facts.writes.empty()) {
      facts.kind = OpKind::kRefused;
      facts.reason = "an op of another library that writes its arguments";
      return facts;
    }
  }
  facts.leaves_bytes_unset = is_one_of(
      name, {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "empty_quantized"});
  facts.overwrites = op.operator_name().overload_name.find("out") != std::string::npos ||
      is_one_of(name, {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
                       "log_normal_", "cauchy_", "geometric_"});
  facts.is_steering = is_one_of(
      name,
      {"topk", "sort", "argsort", "argmax", "argmin", "nonzero", "nonzero_static", "_unique", "_unique2", "unique_dim",
       "unique_consecutive", "unique_dim_consecutive", "kthvalue", "median", "nanmedian", "mode", "searchsorted",
       "bucketize", "multinomial", "histc", "bincount"});
  if (facts.writes.empty() && facts.hidden_writes.empty()) {
    const auto& returns = schema.returns();
    bool is_view = !returns.empty();
    for (const auto& result : returns) is_view = is_view && result.alias_info() != nullptr;
    if (is_view) facts.kind = OpKind::kUnrecorded;
  }
  return facts;
}

// Torch's own ops live as long as the process, so their addresses name them. Others may be unregistered: `scratch` holds
// their facts for the one call.
inline const OpFacts& facts_of(const c10::OperatorHandle& op, OpFacts& scratch) {
  thread_local std::unordered_map<const void*, OpFacts> known;  // per thread: no lock on the way of every op
  const auto& name = op.operator_name();
  auto found = known.find(&name);
  if (found != known.end()) return found->second;
  scratch = examine(op);
  if (name.name.compare(0, 6, "aten::") != 0) return scratch;
  return known.emplace(&name, scratch).first->second;
}

}  // namespace hyper_parallel
