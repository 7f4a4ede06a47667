"""Settings of a process that compiles many small graphs: tests, and the fuzzer."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import _config_module
from torch.utils._config_module import ConfigModule


def make_compilation_cheaper() -> None:
    """Skip work of a compilation that no test checks; compiled code stays the same.

    Compilation makes many objects and little garbage, so the collector runs less often, and not after each graph.
    Dynamo names the function of each traced line in its log, and reads whole files for it. It flushes the processor's
    caches to measure the time of a graph's guards, which only its log shows. It also writes the whole stack of each
    change of an object into its log. PyTorch writes out each graph as soon as its trace logger has a handler, and
    pytest adds a handler to every logger that does not propagate. The trace logger therefore propagates here, and has
    no parent.
    """
    gc.set_threshold(100_000, 20, 20)
    torch._dynamo.config.run_gc_after_compile = False
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):  # from PyTorch 2.11 on
        torch._dynamo.config.side_effect_replay_policy = "silent"
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    torch._dynamo.symbolic_convert.get_funcname = lambda *_: None
    trace = logging.getLogger("torch.__trace")
    trace.propagate, trace.parent = True, None
    _make_settings_cheaper()
    _compile_equal_python_once()
    _share_empty_random_states()


def make_code_generation_cheaper() -> None:
    """Inductor writes the same code in less time, and the C++ compiler translates it without optimizing it.

    Kernels have no vector instructions, so that a kernel compiles in half of the time; ``slow`` tests and the fixture
    ``vector_instructions`` have them. Code has no numbers of lines for a debugger, which take a third of the time of a
    package. By default Inductor prepares its table of operators and dtypes anew for each line of a kernel. It also
    reads an environment variable for each attempt to match a pattern, some thousand times for a graph.
    """
    from torch._inductor import config, cpp_builder, cpu_vec_isa, pattern_matcher
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    config.cpp.simdlen = 1
    _check_vector_instructions_only_to_use_them(config, cpu_vec_isa)
    _compile_kernels_together()
    pattern_matcher._should_debug_node = lambda name: False
    if hasattr(DtypePropagationOpsHandler.__init__, "__wrapped__"):
        return
    prepare = DtypePropagationOpsHandler.__init__

    @functools.wraps(prepare)
    def prepare_once(handler: Any) -> None:
        if not vars(handler):
            prepare(handler)

    DtypePropagationOpsHandler.__init__ = prepare_once
    flags_of = cpp_builder._get_optimization_cflags

    def without_optimization(*args: Any, **more: Any) -> tuple[list[str], list[str]]:
        cflags, ldflags = flags_of(*args, **more)
        return ["O0" if flag.startswith("O") else flag for flag in cflags if flag != "g1"], ldflags

    cpp_builder._get_optimization_cflags = without_optimization


def _check_vector_instructions_only_to_use_them(config: Any, cpu_vec_isa: Any) -> None:
    """Inductor looks for vector instructions, by compiling and loading six programs, only if kernels have them."""
    list_all = cpu_vec_isa.valid_vec_isa_list
    if hasattr(list_all, "known"):
        return

    @functools.wraps(list_all.__wrapped__)
    def list_used() -> list[Any]:
        return [] if config.cpp.simdlen == 1 else list_all()

    list_used.__wrapped__ = list_all.__wrapped__
    list_used.known = list_all
    cpu_vec_isa.valid_vec_isa_list = list_used


def _compile_kernels_together() -> None:
    """The C++ kernels of a graph become one program, which is compiled once all kernels are known.

    A kernel takes a tenth of a second to compile. Its program takes four more tenths, to read the headers and to be
    linked. A release of PyTorch without these private names still compiles each kernel separately.
    """
    from torch._inductor import async_compile, codecache

    makers = getattr(async_compile, "AsyncCompile", None)
    libraries = getattr(codecache, "CppPythonBindingsCodeCache", None)
    wait = getattr(makers, "wait", None)
    if hasattr(wait, "__wrapped__") or not _can_bind_kernels_together(makers, libraries):
        return

    def add(maker: Any, argtypes: list[str], source: str) -> Callable[..., Any]:
        return vars(maker).setdefault("kernels", _Kernels(libraries)).add(argtypes, source)

    @functools.wraps(wait)
    def compile_and_wait(maker: Any, scope: dict[str, Any]) -> None:
        if kernels := vars(maker).get("kernels"):
            kernels.compile()
        wait(maker, scope)

    makers.cpp_pybinding = add
    makers.wait = compile_and_wait


def _can_bind_kernels_together(makers: Any, libraries: Any) -> bool:
    template = getattr(libraries, "suffix_template", "")
    fields = dict.fromkeys(("arg_len", "call_entry_func", "entry_func", "extra_parse_arg"), "")
    try:
        known = "parse_arg" in template.format(**fields)
    except (KeyError, IndexError, ValueError):
        return False
    return known and hasattr(libraries, "load_async") and hasattr(makers, "wait") and hasattr(makers, "cpp_pybinding")


class _Kernels:
    """The C++ kernels of a graph, each in a namespace of their program.

    The program takes the number of a kernel, and as many arguments for each kernel: None stands in for missing ones.
    """

    def __init__(self, libraries: Any) -> None:
        self.libraries = libraries
        self.includes: dict[str, None] = {}
        self.code: list[str] = []
        self.types: list[list[str]] = []
        self.call: Callable[..., Any] | None = None

    def add(self, argtypes: list[str], source: str) -> Callable[..., Any]:
        """A function that calls the kernel in ``source``, whose arguments have the types ``argtypes``."""
        number = len(self.types)
        lines = source.splitlines()
        includes = [line for line in lines if line.startswith("#include")]
        code = [line.replace('extern "C"', "") for line in lines if not line.startswith("#include")]
        self.includes |= dict.fromkeys(includes)
        self.code += [f"namespace kernel_{number} {{", *code, "}"]
        self.types.append([argtype.replace("const ", "") for argtype in argtypes])
        return lambda *args: self.call(number, *args, *[None] * (self.longest - len(args)))

    @property
    def longest(self) -> int:
        return max(map(len, self.types))

    def compile(self) -> None:
        cases = []
        for number, types in enumerate(self.types):
            values = ", ".join(f"parse_arg<{argtype}>(args, {at})" for at, argtype in enumerate(types, 1))
            cases.append(f"case {number}: kernel_{number}::kernel({values}); break;")
        bindings = self.libraries.suffix_template.format(
            arg_len=self.longest + 1,
            call_entry_func=f"switch (parse_arg<int64_t>(args, 0)) {{ {' '.join(cases)} }} Py_RETURN_NONE;",
            entry_func="kernel",
            extra_parse_arg="",
        )
        self.call = self.libraries.load_async("\n".join([*self.includes, *self.code, bindings]))().kernel


def _make_settings_cheaper() -> None:
    """A setting of PyTorch that has no alias, no warning and no other source is read in one step.

    Compilation reads settings some hundred thousand times, and PyTorch looks for all of these each time.
    """
    read = ConfigModule.__getattr__
    unset = getattr(_config_module, "_UNSET_SENTINEL", None)
    if unset is None or hasattr(read, "__wrapped__"):
        return
    plain: dict[int, bool] = {}

    def is_plain(setting: Any) -> bool:
        simple = isinstance(setting.default, (bool, int, float, str, type(None))) and setting.justknob is None
        sources = (setting.env_value_force, setting.env_value_default)
        kept = isinstance(setting.user_override, ContextVar)  # other releases read in their own way
        return (
            simple and kept and all(value is unset for value in sources) and not (setting.alias or setting.deprecated)
        )

    @functools.wraps(read)
    def read_quickly(module: Any, name: str) -> Any:
        setting = module._config.get(name)
        if setting is None or setting.hide:
            return read(module, name)
        key = id(setting)  # settings live as long as PyTorch
        if key not in plain:
            plain[key] = is_plain(setting)
        if not plain[key]:
            return read(module, name)
        value = setting.user_override.get()
        return setting.default if value is unset else value

    ConfigModule.__getattr__ = read_quickly


def _compile_equal_python_once() -> None:
    """Graphs with the same Python share its bytecode.

    Inductor's passes write the Python of an unchanged graph several times, and tests compile the same model.
    """
    from torch.fx import graph_module

    codes: dict[tuple[Any, ...], Any] = {}

    def compile_once(source: str, name: str, mode: str, **flags: Any) -> Any:
        key = source, mode, *flags.items()
        if key not in codes:
            codes[key] = compile(source, name, mode, **flags)
        return codes[key]

    vars(graph_module).setdefault("compile", compile_once)  # before the builtin function


def _share_empty_random_states() -> None:
    """Tracing a graph resets three states of random numbers twice; their two empty tensors are made once for all."""
    from torch._decomp.decompositions_for_rng import PhiloxState

    begin = dict(vars(PhiloxState()))

    @functools.wraps(PhiloxState.reset)
    def reset(state: Any) -> None:
        vars(state).update(begin)

    if not hasattr(PhiloxState.reset, "__wrapped__"):
        PhiloxState.reset = reset


def in_one_piece_of_stack(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose calls of further functions lie in one piece of memory.

    Python keeps frames in pieces of 16 KiB. A loop that calls a function at the end of a piece allocates and frees the
    next one in each turn. The stack of a compilation is deep enough to have many such ends. The frame of ``call`` needs
    half of a large piece, so that the other half is left for the frames above it.
    """

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        return function(*args, **more)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return call


_SLOTS = 2**17
"""The size of a frame that needs a piece of 2 MiB, in slots of 8 bytes; memory that is not used is never touched."""


def skip_present_objects_in_collections() -> None:
    """Exclude all present objects from garbage collection: imports made most of them, and they live to the end."""
    gc.collect()
    gc.freeze()
