// Which of the compiled ISAs this machine runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace m2po {

// The ISAs that are compiled in and that this machine runs, best first.
std::vector<std::string> usable_isas();

// Makes kernels() return those of `isa`, one of usable_isas(); false if it is none. For tests and benchmarks.
bool use_isa(const std::string& isa);

}  // namespace m2po
