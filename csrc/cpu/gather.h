// Brings a block of a strided view of any dtype into a contiguous array of Real, or points at it where it already is one.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../core/convert.h"
#include "../core/types.h"

namespace m2po {
inline namespace M2PO_ISA {

// Calls f(start, count, place) for each piece of tokens [begin, begin + n) that lies in one row.
template <class F>
inline void for_each_piece(const Grid& grid, const Source& source, int64_t begin, int n, F f) {
  int64_t row = begin / grid.columns, column = begin % grid.columns;
  for (int done = 0; done < n;) {
    const int count = static_cast<int>(std::min<int64_t>(n - done, grid.columns - column));
    f(row * source.row_stride + column * source.column_stride, count, done);
    done += count;
    ++row;
    column = 0;
  }
}

template <class Real>
inline constexpr DType dtype_of = std::is_same_v<Real, float> ? DType::f32 : DType::f64;
template <>
inline constexpr DType dtype_of<uint8_t> = DType::u8;

template <class Real, class T, class Convert>
inline void gather(const Source& source, const Grid& grid, int64_t begin, int n, Real* to, Convert convert) {
  const T* data = static_cast<const T*>(source.data);
  for_each_piece(grid, source, begin, n, [&](int64_t start, int count, int place) {
    const T* from = data + start;
    Real* out = to + place;
    if (source.column_stride == 1) {
      for (int i = 0; i < count; ++i) out[i] = convert(from[i]);
    } else if (source.column_stride == 0) {
      std::fill_n(out, count, convert(*from));
    } else {
      for (int i = 0; i < count; ++i) out[i] = convert(from[i * source.column_stride]);
    }
  });
}

inline bool is_flat(const Source& source, const Grid& grid, int64_t begin, int n) {
  return source.column_stride == 1 && (source.row_stride == grid.columns || begin % grid.columns + n <= grid.columns);
}

// `scratch` holds n values rounded up to a whole vector, the rest zeros; `direct` allows pointing into the source.
template <class Real>
inline const Real* fetch(const Source& source, const Grid& grid, int64_t begin, int n, Real* scratch, bool direct) {
  if (direct && source.dtype == dtype_of<Real> && is_flat(source, grid, begin, n)) {
    const int64_t row = begin / grid.columns, column = begin % grid.columns;
    return static_cast<const Real*>(source.data) + row * source.row_stride + column;
  }
  switch (source.dtype) {
    case DType::f32:
      gather<Real, float>(source, grid, begin, n, scratch, [](float x) { return static_cast<Real>(x); });
      break;
    case DType::f64:
      gather<Real, double>(source, grid, begin, n, scratch, [](double x) { return static_cast<Real>(x); });
      break;
    case DType::bf16:
      gather<Real, uint16_t>(source, grid, begin, n, scratch, [](uint16_t x) { return static_cast<Real>(bf16_to_float(x)); });
      break;
    case DType::f16:
      gather<Real, uint16_t>(source, grid, begin, n, scratch, [](uint16_t x) { return static_cast<Real>(f16_to_float(x)); });
      break;
    case DType::u8:
      gather<Real, uint8_t>(source, grid, begin, n, scratch, [](uint8_t x) { return x ? Real(1) : Real(0); });
      break;
    case DType::i16:
    case DType::i32:
    case DType::i64:
      break;  // native.py brings such masks to bytes
  }
  return scratch;
}

template <class Real, class T, class Convert>
inline void scatter(const Source& to, const Grid& grid, int64_t begin, int n, const Real* values, Convert convert) {
  T* data = static_cast<T*>(const_cast<void*>(to.data));
  for_each_piece(grid, to, begin, n, [&](int64_t start, int count, int place) {
    T* out = data + start;
    for (int i = 0; i < count; ++i) out[i * to.column_stride] = convert(values[place + i]);
  });
}

template <class Real>
inline void store(const Source& to, const Grid& grid, int64_t begin, int n, const Real* values) {
  switch (to.dtype) {
    case DType::f32:
      scatter<Real, float>(to, grid, begin, n, values, [](Real x) { return static_cast<float>(x); });
      break;
    case DType::f64:
      scatter<Real, double>(to, grid, begin, n, values, [](Real x) { return static_cast<double>(x); });
      break;
    case DType::bf16:
      scatter<Real, uint16_t>(to, grid, begin, n, values, [](Real x) { return float_to_bf16(static_cast<float>(x)); });
      break;
    default:
      scatter<Real, uint16_t>(to, grid, begin, n, values, [](Real x) { return float_to_f16(static_cast<float>(x)); });
      break;
  }
}

}  // namespace M2PO_ISA
}  // namespace m2po
