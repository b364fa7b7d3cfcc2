// What the tree and the slots throw; bind_radix_tree.cpp maps each to the class of the same name in
// cachekernels.tree_types. Bad arguments are std::invalid_argument (ValueError). Nothing has changed when one is thrown.
#pragma once
#include <stdexcept>

namespace cachesvc {

struct TreeError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct StaleNode : TreeError {
    using TreeError::TreeError;
};
struct LockError : TreeError {
    using TreeError::TreeError;
};
struct Busy : TreeError {
    using TreeError::TreeError;
};
struct UnknownOp : TreeError {
    using TreeError::TreeError;
};

struct StateError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct DoubleFree : StateError {
    using StateError::StateError;
};

// Thrown by check() only: an invariant does not hold.
struct BrokenInvariant : std::logic_error {
    using std::logic_error::logic_error;
};

}  // namespace cachesvc
