"""The test files that need a device on which Triton kernels run."""

from __future__ import annotations

INTERPRETED_TOGETHER = (
    ("test_attention_kernel.py", "test_visible_range.py", "test_attention_parts.py"),
    (
        "test_prefill.py",
        "test_latent_kernels.py",
        "test_calibrated_kernels.py",
        "test_new_tokens.py",
        "test_key_factor_kernels.py",
    ),
    (
        "test_store_kernel.py",
        "test_headers.py",
        "test_references.py",
        "test_deepseek_v4_kernels.py",
        "test_gather.py",
        "test_dequantize.py",
        "test_random_calls.py",
    ),
)
"""Files in tests/kernels/ whose tests run in Triton's interpreter, in groups whose slow tests take equally long."""

KERNEL_TESTS = [
    "test_attention_kernel.py",
    "test_attention_parts.py",
    "test_calibrated_kernels.py",
    "test_deepseek_v4_kernels.py",
    "test_dequantize.py",
    "test_headers.py",
    "test_key_factor_kernels.py",
    "test_latent_kernels.py",
    "test_new_tokens.py",
    "test_prefill.py",
    "test_query_heads.py",
    "test_random_calls.py",
    "test_references.py",
    "test_store_kernel.py",
]
"""Files that test nothing else."""
