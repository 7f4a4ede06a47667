"""Package a decode step ahead of time, run the package without the model, and compare the tokens.

    python examples/package_step.py
    python examples/package_step.py --policy int4_per_token_head --output step.pt2

The package is a file of AOTInductor with the weights. Its caches are byte tensors that the caller owns.
``examples/packaged_step.cpp`` generates with the same file in C++. The last line of the output has the command that
compiles it.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

import torch
from hand_written_model import VOCAB_SIZE, tiny_transformer
from torch.utils import cpp_extension

import kvcompile
from kvcompile.packaging import launches

SOURCE = Path(__file__).with_name("packaged_step.cpp")


def generate(step: kvcompile.PackagedStep, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens after ``prompt``, which the step reads token by token."""
    caches, tokens = step.new_caches(), list(prompt)
    with torch.device(step.signature.device):
        for position in range(len(prompt) + num_tokens - 1):
            arguments = {"tokens": torch.tensor([[tokens[position]]]), "input_pos": torch.tensor([position])}
            (logits,) = step(arguments, caches)
            if position >= len(prompt) - 1:
                tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def compile_command(program: Path, device: str) -> list[str]:
    """The command that compiles the C++ program with the headers and the libraries that PyTorch ships.

    For packages on a GPU the program also contains ``launch.cpp`` of kvcompile.
    """
    libraries = [path for path in cpp_extension.library_paths() if Path(path).is_dir()]
    for_gpu = [str(launches.SOURCE), f"-I{launches.cuda_headers()}", "-Wl,--no-as-needed", "-ltorch_cuda", "-lc10_cuda"]
    return [
        *("g++", "-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *(f"-I{path}" for path in cpp_extension.include_paths()),
        *(str(SOURCE), "-o", str(program)),
        *(f"-L{path}" for path in libraries),
        *(f"-Wl,-rpath,{path}" for path in libraries),
        *(for_gpu if device == "cuda" else []),
        *("-ltorch", "-ltorch_cpu", "-lc10"),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="int8_per_token_head", help="preset or file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "step.pt2")
    options = parser.parse_args(arguments)

    model = tiny_transformer().to(options.device)
    with torch.device(options.device):
        example = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    step = kvcompile.package(model, example, policy=options.policy, path=options.output)
    for one in step.signature.inputs:
        print(f"{one.kind:9} {one.name:36} {one.type.dtype} {list(one.type.shape)} {one.format}")

    prompt = torch.randint(VOCAB_SIZE, (8,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = generate(step, prompt, options.new_tokens)
    print(f"tokens: {' '.join(map(str, tokens))}")
    print(f"package: {options.output}, {options.output.stat().st_size} bytes; caches: {step.cache_nbytes} bytes")
    command = compile_command(Path("packaged_step"), options.device)
    print(f"in C++: {shlex.join(command)} && ./packaged_step {options.output} {options.new_tokens}", end="")
    print(f" {' '.join(map(str, prompt))}")


if __name__ == "__main__":
    main()
