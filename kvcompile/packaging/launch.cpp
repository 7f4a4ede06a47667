// The operator kvcompile_package::launch: it runs a Triton kernel of a packaged step on a CUDA device, without Python.
//
// A package for a GPU calls this operator. A C++ program compiles this file into itself (docs/packages.md). In Python,
// kvcompile.load_package loads it; without kvcompile, torch.ops.load_library loads a shared library of this file.

#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <cuda.h>
#include <torch/library.h>

// A function of libtorch_cuda. Its header would need the headers of the CUDA runtime.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace {

// A function of the CUDA driver. A program thus needs no driver before it launches, and does not link to one.
template <typename Function>
Function driver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  TORCH_CHECK(library != nullptr, "kvcompile: the CUDA driver is missing: ", dlerror());
  void* const found = dlsym(library, name);
  TORCH_CHECK(found != nullptr, "kvcompile: the CUDA driver has no function ", name, "; install a newer driver");
  return reinterpret_cast<Function>(found);
}

#define DRIVER(name) driver<decltype(&name)>(#name)

void check(CUresult result, std::string_view action, std::string_view kernel) {
  static const auto describe = DRIVER(cuGetErrorString);
  if (result == CUDA_SUCCESS) return;
  const char* text = "unknown error";
  describe(result, &text);
  TORCH_CHECK(false, "kvcompile: the CUDA driver cannot ", action, " the kernel ", kernel, ": ", text);
}

std::string from_base64(std::string_view text) {
  std::array<int, 256> digits{};
  const std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < alphabet.size(); ++i) digits[static_cast<unsigned char>(alphabet[i])] = static_cast<int>(i);
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  unsigned word = 0;
  int bits = 0;
  for (const unsigned char character : text) {
    if (character == '=') break;
    word = word << 6 | static_cast<unsigned>(digits[character]);
    bits += 6;
    if (bits >= 8) bytes.push_back(static_cast<char>(word >> (bits -= 8) & 0xff));
  }
  return bytes;
}

// Loads machine code on the current device. More than 48 KiB of shared memory must be requested.
CUfunction load(std::string_view name, std::string_view code, int shared_memory) {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  check(DRIVER(cuModuleLoadData)(&module, from_base64(code).data()), "load", name);
  check(DRIVER(cuModuleGetFunction)(&function, module, std::string(name).c_str()), "find", name);
  if (shared_memory > (48 << 10)) {
    const auto attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    check(DRIVER(cuFuncSetCacheConfig)(function, CU_FUNC_CACHE_PREFER_SHARED), "configure", name);
    check(DRIVER(cuFuncSetAttribute)(function, attribute, shared_memory), "give shared memory to", name);
  }
  return function;
}

// The kernel on a device. It is loaded once, and stays loaded. ``digest`` identifies the code.
CUfunction loaded(
    int device, std::string_view digest, std::string_view name, std::string_view code, int shared_memory) {
  static std::map<std::pair<int, std::string>, CUfunction, std::less<>> functions;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [place, is_new] = functions.try_emplace({device, std::string(digest)}, nullptr);
  if (place->second == nullptr) place->second = load(name, code, shared_memory);
  return place->second;
}

// Runs a kernel on the current stream of the device of its tensors.
//
// read, written: the tensors, in the order in which the kernel's parameters first name them.
// parameters: for each parameter, the index of its tensor in read and written together, or -1 for the next scalar.
// alignments: for each tensor, the number of bytes that its address must be a multiple of.
// scalars: the bits of each scalar, in the low bytes of a word.
// name, code, digest: the kernel, its machine code (a cubin as base64), and a name for this code.
// grid: three numbers of programs. threads, shared_memory: threads and bytes of a program.
// early: whether the kernel may start before the previous kernel ends. It waits for the results of that kernel itself.
void launch(
    at::TensorList read, at::TensorList written, at::IntArrayRef parameters, at::IntArrayRef alignments,
    at::IntArrayRef scalars, std::string_view name, std::string_view code, std::string_view digest,
    at::IntArrayRef grid, int64_t threads, int64_t shared_memory, bool early) {
  const at::Device device = written.at(0).device();
  const c10::DeviceGuard guard(device);
  std::vector<void*> addresses;
  for (const at::TensorList& tensors : {read, written}) {
    for (const at::Tensor& tensor : tensors) {
      const size_t place = addresses.size();
      addresses.push_back(tensor.data_ptr());
      TORCH_CHECK(tensor.device() == device, "kvcompile: ", name, " takes tensors on ", device, " only");
      TORCH_CHECK(
          reinterpret_cast<uintptr_t>(addresses.back()) % static_cast<uintptr_t>(alignments.at(place)) == 0,
          "kvcompile: ", name, " needs tensors aligned to ", alignments.at(place), " bytes");
    }
  }
  // CUDA reads as many pointers as the kernel has parameters. The last two pointers are Triton's scratch memory,
  // which these kernels ignore.
  void* scratch = nullptr;
  std::vector<void*> pointers;
  size_t scalar = 0;
  for (const int64_t parameter : parameters) {
    pointers.push_back(
        parameter < 0 ? const_cast<int64_t*>(&scalars.at(scalar++)) : static_cast<void*>(&addresses.at(parameter)));
  }
  pointers.insert(pointers.end(), 2, &scratch);

  void* stream = nullptr;
  TORCH_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &stream) == 0, "kvcompile: no CUDA stream");
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(grid.at(0));
  config.gridDimY = static_cast<unsigned>(grid.at(1));
  config.gridDimZ = static_cast<unsigned>(grid.at(2));
  config.blockDimX = static_cast<unsigned>(threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(shared_memory);
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  const CUfunction function = loaded(device.index(), digest, name, code, static_cast<int>(shared_memory));
  static const auto launch_kernel = DRIVER(cuLaunchKernelEx);
  check(launch_kernel(&config, function, pointers.data(), nullptr), "launch", name);
}

}  // namespace

TORCH_LIBRARY(kvcompile_package, library) {
  // Kernels were compiled for the strides of the traced tensors, so Inductor must keep these strides.
  library.def(
      "launch(Tensor[] read, Tensor(a!)[] written, int[] parameters, int[] alignments, int[] scalars, str name, "
      "str code, str digest, int[] grid, int threads, int shared_memory, bool early) -> ()",
      {at::Tag::needs_exact_strides});
}

TORCH_LIBRARY_IMPL(kvcompile_package, CUDA, library) {
  library.impl("launch", launch);
}
