#include "checks.h"

#include <torch/csrc/stable/device.h>
#include <torch/headeronly/core/DeviceType.h>

#include <algorithm>
#include <limits>
#include <string>

namespace locks::binding {

namespace {

constexpr int kMaxDims = 5;

std::string dtype_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "f32";
    case ScalarType::Double:
      return "f64";
    case ScalarType::BFloat16:
      return "bf16";
    case ScalarType::Half:
      return "f16";
    case ScalarType::Int:
      return "i32";
    case ScalarType::Long:
      return "i64";
    case ScalarType::Byte:
      return "u8";
    default:
      return torch::headeronly::toString(type);
  }
}

template <class Items, class Print>
std::string joined(const char* open, const Items& items, const char* separator, const char* close,
                   Print print) {
  std::ostringstream text;
  text << open;
  const char* between = "";
  for (const auto& item : items) {
    text << between;
    print(text, item);
    between = separator;
  }
  text << close;
  return text.str();
}

std::string list_text(std::span<const std::int64_t> values) {
  return joined("[", values, ", ", "]", [](auto& text, std::int64_t value) { text << value; });
}

std::string shape_text(std::span<const Dim> shape) {
  return joined("[", shape, ", ", "]", [](auto& text, const Dim& dim) {
    if (dim.name != nullptr) {
      text << dim.name;
    } else {
      text << dim.size;
    }
  });
}

std::string dtypes_text(DTypes dtypes) {
  return joined("", dtypes, "|", "", [](auto& text, ScalarType type) { text << dtype_text(type); });
}

std::span<const std::int64_t> as_span(torch::headeronly::IntHeaderOnlyArrayRef values) {
  return {values.data(), values.size()};
}

// True if the strides give each element memory of its own: taken from the smallest stride upwards,
// each dimension steps over all that the ones before it span.
bool elements_are_apart(std::span<const std::int64_t> sizes,
                        std::span<const std::int64_t> strides) {
  struct Axis {
    std::int64_t stride, size;
  };
  std::array<Axis, kMaxDims> axes;  // ascending strides
  std::size_t count = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] == 1) continue;
    std::size_t place = count++;
    for (; place > 0 && axes[place - 1].stride > strides[i]; --place) axes[place] = axes[place - 1];
    axes[place] = {strides[i], sizes[i]};
  }
  std::int64_t span = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (axes[i].stride < span) return false;
    span += axes[i].stride * (axes[i].size - 1);
  }
  return true;
}

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another device";
}

}  // namespace

void Checks::tensor(const char* name, const Tensor& tensor, std::initializer_list<Dim> shape,
                    DTypes dtypes, Strides strides) const {
  if (!tensor.defined()) fail(name, ": expected a tensor, got None");
  if (device_ == kOnCpu ? !tensor.is_cpu()
                        : !tensor.is_cuda() || tensor.get_device_index() != device_) {
    const std::string wanted = device_ == kOnCpu ? "a CPU tensor (the operator has no CUDA kernel)"
                                                 : "a tensor on cuda:" + std::to_string(device_);
    fail(name, ": expected ", wanted, ", got one on ", device_text(tensor));
  }
  const std::span<const std::int64_t> sizes = as_span(tensor.sizes());
  const ScalarType type = tensor.scalar_type();
  const bool same_shape = std::equal(
      sizes.begin(), sizes.end(), shape.begin(), shape.end(),
      [](std::int64_t size, const Dim& dim) { return dim.size < 0 || size == dim.size; });
  if (!same_shape || std::find(dtypes.begin(), dtypes.end(), type) == dtypes.end()) {
    fail(name, ": expected ", shape_text({shape.begin(), shape.size()}), " ", dtypes_text(dtypes),
         ", got ", list_text(sizes), " ", dtype_text(type));
  }

  const std::span<const std::int64_t> steps = as_span(tensor.strides());
  if (strides == Strides::kContiguous) {
    if (!tensor.is_contiguous()) {
      fail(name, ": expected a contiguous tensor, got strides ", list_text(steps));
    }
    return;
  }
  if (sizes.back() > 1 && steps.back() != 1) {
    fail(name, ": expected a last dimension of stride 1, got strides ", list_text(steps));
  }
  if (strides == Strides::kOwnRows && !elements_are_apart(sizes, steps)) {
    fail(name, ": expected elements that share no memory, got strides ", list_text(steps));
  }
}

int Checks::to_int(const char* name, std::int64_t value) const {
  if (value < 0 || value > std::numeric_limits<int>::max()) {
    fail(name, ": expected 0 to 2147483647, got ", value);
  }
  return static_cast<int>(value);
}

std::int64_t stride_or(const Tensor& tensor, int dim, std::int64_t dense) {
  return tensor.size(dim) > 1 ? tensor.stride(dim) : dense;
}

}  // namespace locks::binding
