// Generates tokens with a packaged decode step: no Python, no model code, packed caches as byte tensors.
//
//     packaged_step step.pt2 NEW_TOKENS TOKEN [TOKEN ...]
//
// examples/package_step.py makes the package and prints the command that compiles this program. The package takes one
// token [1, 1] and, if its model asks for it, the position of that token [1]. The prompt is read token by token. For a
// package on a GPU the command also compiles kvcompile/packaging/launch.cpp into the program.

#include <cstdint>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

using Metadata = std::unordered_map<std::string, std::string>;

std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> found;
  std::stringstream stream(text);
  for (std::string number; std::getline(stream, number, ',');) found.push_back(std::stoll(number));
  return found;
}

torch::Dtype dtype(const std::string& name) {
  static const std::unordered_map<std::string, torch::Dtype> known = {
      {"uint8", torch::kUInt8},     {"int32", torch::kInt32},   {"int64", torch::kInt64},
      {"float32", torch::kFloat32}, {"float16", torch::kHalf}, {"bfloat16", torch::kBFloat16},
  };
  const auto found = known.find(name);
  if (found == known.end()) throw std::runtime_error("this program does not know the dtype " + name);
  return found->second;
}

// Zeros for every input: arguments of the first step, empty caches, and the other state. Inputs are described by
// "input.0.name", "input.0.kind", "input.0.dtype", "input.0.shape", and so on.
std::vector<torch::Tensor> new_inputs(const Metadata& metadata, std::vector<size_t>& arguments) {
  std::vector<torch::Tensor> inputs;
  const torch::Device device(metadata.at("device"));
  const size_t count = std::stoul(metadata.at("inputs"));
  for (size_t place = 0; place < count; ++place) {
    const std::string prefix = "input." + std::to_string(place) + ".";
    const auto options = torch::dtype(dtype(metadata.at(prefix + "dtype"))).device(device);
    inputs.push_back(torch::zeros(numbers(metadata.at(prefix + "shape")), options));
    if (metadata.at(prefix + "kind") == "argument") arguments.push_back(place);
  }
  return inputs;
}

int main(int argc, char** argv) try {
  if (argc < 4) throw std::runtime_error("usage: packaged_step step.pt2 NEW_TOKENS TOKEN [TOKEN ...]");
  torch::NoGradGuard no_grad;
  torch::inductor::AOTIModelPackageLoader step(argv[1]);

  std::vector<size_t> arguments;
  std::vector<torch::Tensor> inputs = new_inputs(step.get_metadata(), arguments);
  if (arguments.empty() || arguments.size() > 2) {
    throw std::runtime_error("this program passes a token and its position; the package takes other arguments");
  }

  int64_t token = 0;
  const int prompt = argc - 3, total = prompt + std::stoi(argv[2]) - 1;
  for (int position = 0; position < total; ++position) {
    if (position < prompt) token = std::stoll(argv[3 + position]);
    inputs[arguments[0]].fill_(token);
    if (arguments.size() == 2) inputs[arguments[1]].fill_(position);
    const torch::Tensor logits = step.run(inputs).at(0);  // the step writes into the caches
    token = logits.select(1, -1).argmax(-1).item<int64_t>();
    if (position >= prompt - 1) std::cout << token << (position + 1 < total ? " " : "\n");
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
