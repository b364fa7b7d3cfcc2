// What this core was built from; cachekernels/sources.py writes the definition when it is built.
#pragma once

namespace cachesvc {
extern const char* const source_digest;
}  // namespace cachesvc
