// Decode greedily with a package of kivi_ops.export.compile_package, in C++: no Python, and nothing of kivi-ops.
//
//   ./decode package.pt2 BATCH TOKEN ...      every row is given the same prompt
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: decode package.pt2 BATCH TOKEN ...\n";
    return 2;
  }
  c10::InferenceMode no_grad;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const int64_t batch = std::atoll(argv[2]);
  std::vector<int64_t> prompt;
  for (int i = 3; i < argc; ++i) prompt.push_back(std::atoll(argv[i]));

  auto padding = torch::zeros({batch}, torch::kInt32);
  // Inputs must be contiguous: the package does not look at strides.
  auto ids = torch::tensor(prompt, torch::kInt64).expand({batch, -1}).contiguous();
  int64_t start = 0;  // the column of the first new token; 0 begins anew
  for (int step = 0; step < 16; ++step) {
    std::vector<at::Tensor> inputs{ids, torch::tensor(start, torch::kInt64), padding};
    auto logits = model.run(inputs)[0];  // [B, 1, V]; the quantised cache stays in the package
    start += ids.size(1);
    ids = logits.select(1, -1).argmax(-1, /*keepdim=*/true);
    std::cout << ids[0].item<int64_t>() << ' ' << std::flush;
  }
  std::cout << '\n';
}
