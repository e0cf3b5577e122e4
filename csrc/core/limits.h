// From a rule to the bounds that the kernels compare with. On the host.
#pragma once

#include <algorithm>
#include <cmath>

#include "cut.h"
#include "types.h"

namespace m2po {

template <class Real>
inline Limits<Real> limits_of(const Rule& rule, const Unit& unit) {
  Limits<Real> limits;
  limits.candidate_above = static_cast<Real>(rule.m2_threshold);
  if (static_cast<double>(limits.candidate_above) > rule.m2_threshold)
    limits.candidate_above = std::nextafter(limits.candidate_above, Real(0));
  // At tau = 0 a low v is 0, and at infinity nothing is decided.
  const int k = unit.scale_exponent, first = std::min(k, 1000);
  limits.scale = unit.mantissa == 0 ? 0.0 : std::ldexp(1.0, first);
  limits.scale_rest = std::ldexp(1.0, k - first);
  limits.log_high = static_cast<Real>(std::log1p(rule.clip_high));
  limits.log_low = static_cast<Real>(std::log1p(-rule.clip_low));
  limits.ratio_high = static_cast<Real>(1 + rule.clip_high);
  limits.ratio_low = static_cast<Real>(1 - rule.clip_low);
  limits.log_cap = static_cast<Real>(std::log(rule.ratio_cap));
  limits.cap = static_cast<Real>(rule.ratio_cap);
  limits.kl_coef = static_cast<Real>(rule.kl_coef);
  return limits;
}

}  // namespace m2po
