// Which slot a storage has, while its tape is open.
#pragma once

#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hyper_parallel {

// Asked twice for every tensor of every op, so it is one block of memory: a table of the standard library allocates for each entry.
// Entries are never taken out one by one.
class StorageTable {
 public:
  static constexpr int kMissing = -1;

  // For so many storages nothing moves.
  void reserve(size_t count) {
    size_t wanted = kFewest;
    while (wanted < 2 * count) wanted *= 2;
    if (wanted > entries_.size()) grow(wanted);
  }

  int find(const c10::StorageImpl* storage) const {
    if (entries_.empty()) return kMissing;
    const Entry& entry = entries_[place_of(storage)];
    return entry.storage == nullptr ? kMissing : entry.slot;
  }

  // Adds a storage; false where it is known.
  bool add(const c10::StorageImpl* storage, int slot) {
    if (2 * (count_ + 1) > entries_.size()) grow(entries_.empty() ? kFewest : 2 * entries_.size());
    Entry& entry = entries_[place_of(storage)];
    if (entry.storage != nullptr) return false;
    entry = {storage, slot};
    count_ += 1;
    return true;
  }

  // Forgets all storages, and keeps the memory.
  void clear() {
    if (count_ > 0) std::fill(entries_.begin(), entries_.end(), Entry());
    count_ = 0;
  }

  size_t memory_bytes() const { return entries_.capacity() * sizeof(Entry); }

 private:
  static constexpr size_t kFewest = 64;  // a power of two, as all sizes are

  struct Entry {
    const c10::StorageImpl* storage = nullptr;
    int slot = kMissing;
  };

  // Where the storage is, or the free entry where it belongs. At most half of the entries are taken, so there is one.
  size_t place_of(const c10::StorageImpl* storage) const {
    const size_t mask = entries_.size() - 1;
    size_t place = (reinterpret_cast<uintptr_t>(storage) * 0x9e3779b97f4a7c15ULL >> 20) & mask;
    while (entries_[place].storage != nullptr && entries_[place].storage != storage) place = (place + 1) & mask;
    return place;
  }

  void grow(size_t size) {
    std::vector<Entry> before(size);
    before.swap(entries_);
    for (const Entry& entry : before) {
      if (entry.storage != nullptr) entries_[place_of(entry.storage)] = entry;
    }
  }

  std::vector<Entry> entries_;
  size_t count_ = 0;
};

}  // namespace hyper_parallel
